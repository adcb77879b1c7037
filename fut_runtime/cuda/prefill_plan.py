"""How much memory of a card prefill takes beside decoding, and the configuration that the library gets."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from fut_runtime.artifact.spec import ModelSpec
from fut_runtime.cuda.activations import ActivationState
from fut_runtime.cuda.library import Library, library
from fut_runtime.cuda.pages import pages_for
from fut_runtime.cuda.structs import PAGE_TOKENS, Accumulation, DecoderConfig, Format, Layer, PrefillConfig

#: Most tokens of a run; longer calls take several.
MAX_PREFILL_ROWS = 8192
#: Tokens of prompts whose history is held at once, where contexts are shorter and requests enough.
HISTORY_TOKENS = 32768
_FORMATS = {"e4m3": Format.E4M3, "bf16": Format.BF16}


def history_page_bytes(model: ModelSpec) -> int:
    """Bytes of 64 tokens of the history: K and V in BF16 of all layers and KV heads."""
    return 2 * 2 * PAGE_TOKENS * model.kv_size * model.num_layers


def wanted_history_pages(context_tokens: int, requests: int) -> int:
    """Pages for prompts of `context_tokens` tokens: HISTORY_TOKENS, at least one prompt, at most all requests."""
    one = pages_for(context_tokens)
    return min(requests * one, max(one, pages_for(HISTORY_TOKENS)))


def site_widths(model: ModelSpec) -> dict[str, int]:
    """Elements of a row at each E4M3 site."""
    return {
        "qkv": model.hidden_size, "o": model.q_size, "gate_up": model.hidden_size, "down": model.intermediate_size
    }  # fmt: skip


def prefill_config(
    mode: str,
    layers: Sequence[Layer],
    decoder: DecoderConfig,
    *,
    history_pages: int,
    rows: int,
    scale_mode: str = "request",
    history: int = 0,
    activations: ActivationState | None = None,
) -> PrefillConfig:
    """`fut_prefill_config` without a workspace; addresses may be left out where only sizes are asked for.

    Args:
        mode: `e4m3` or `bf16`.
        rows: most tokens of a run.
        activations: the state of E4M3 activations, with `e4m3`.
    """
    states = decoder.max_slots if mode == "e4m3" and scale_mode == "request" else 1
    config = PrefillConfig(
        layer=(Layer * len(layers))(*layers),
        history=history,
        history_pages=history_pages,
        states=states if activations is None else activations.states,
        margin=1.0,
        format=_FORMATS[mode],
        accumulation=Accumulation.FAST,
        max_rows=rows,
        max_requests=min(rows, decoder.max_slots),
    )
    if activations is not None:
        config.scale = activations.scale.data_ptr()
        config.amax = activations.amax.data_ptr()
        config.saturated = activations.saturated.data_ptr()
        config.ignored = activations.ignored.data_ptr()
        config.frozen = activations.scale_mode == "frozen"
        config.margin = activations.margin
    return config


def run_rows(context_tokens: int, requests: int) -> int:
    """Most tokens that a run is made for: what all requests can hold, up to MAX_PREFILL_ROWS."""
    return min(MAX_PREFILL_ROWS, requests * context_tokens)


def prefill_workspace_bytes(config: PrefillConfig, decoder: DecoderConfig, functions: Library | None = None) -> int:
    """Bytes that the library (by default the package's own) needs for a run.

    Raises:
        UnsupportedError: there is no library here; the message says why.
    """
    return int((functions or library()).fut_prefill_workspace_bytes(ctypes.byref(config), ctypes.byref(decoder)))
