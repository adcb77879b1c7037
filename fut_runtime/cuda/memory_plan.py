"""How much device memory an artifact takes: its weights, the cache for so many tokens, and what a step needs."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from fut_runtime.artifact.manifest import KVCacheSpec, Manifest
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.spec import ModelSpec
from fut_runtime.cuda.arena import ArenaPlan
from fut_runtime.cuda.library import library
from fut_runtime.cuda.pages import pages_for
from fut_runtime.cuda.prefill_plan import (
    history_page_bytes,
    prefill_config,
    prefill_workspace_bytes,
    run_rows,
    wanted_history_pages,
)
from fut_runtime.cuda.prefill_weights import PrefillChoice, choose_prefill_mode
from fut_runtime.cuda.structs import PAGE_TOKENS, AttentionShape, DecoderConfig, KVCache, Layer
from fut_runtime.cuda.tensors import DECODE_FORMATS, DeviceTensors, choose_decode_mode, needed_tensors
from fut_runtime.errors import FutError, UnsupportedError

#: Rows of a step: tokens of a prompt that one pass takes, and requests that decode together.
MAX_ROWS = 64
#: Requests that may hold a cache at once.
MAX_SLOTS = 256


def block_bytes(bits: int, head_dim: int) -> int:
    """Bytes of 64 tokens of one KV head: K and V, and with 4 bits a BF16 scale and zero point a token for each."""
    return PAGE_TOKENS * (4 * head_dim if bits == 16 else head_dim + 8)


def page_bytes(model: ModelSpec, cache: KVCacheSpec) -> int:
    """Bytes of a page of the cache: the blocks of all layers and KV heads."""
    return block_bytes(cache.bits, model.head_dim) * model.num_layers * model.num_kv_heads


def choose_cache(manifest: Manifest, kv_cache: str | None) -> KVCacheSpec:
    """The cache asked for: `int4`, `bf16`, or None for what the artifact says.

    Raises:
        UnsupportedError: another name, or an INT4 cache whose V comes rotated.
    """
    if kv_cache not in (None, "int4", "bf16"):
        raise UnsupportedError(f"kv_cache is {kv_cache!r}, expected one of int4, bf16")
    if kv_cache == "bf16":
        return KVCacheSpec(bits=16, rotation=False, zero_point=False)
    if kv_cache == "int4" and manifest.kv_cache.bits != 4:
        return KVCacheSpec()
    if manifest.kv_cache.v_folded:
        raise UnsupportedError(
            "the artifact's weights have the rotation of V in them (kv_cache.v_folded), and the CUDA kernels rotate V "
            "themselves: choose kv_cache bf16 or the reference backend, or convert again without kv_cache.fold_v"
        )
    return manifest.kv_cache


def loaded_formats(decode_format: str, choice: PrefillChoice) -> list[str]:
    """Formats of the weights that are loaded: those of decoding, and those of prefill where they are others."""
    return list(dict.fromkeys(f for f in (decode_format, choice.weight_format) if f is not None))


def rope_bytes(model: ModelSpec, context_tokens: int) -> int:
    """Bytes of the cosines and sines, FP32 [context, head_dim / 2] each."""
    return 2 * 4 * context_tokens * (model.head_dim // 2)


def decoder_config(
    tensors: DeviceTensors,
    cache: KVCacheSpec,
    *,
    context_tokens: int,
    pages: int,
    embed: int = 0,
    rope: tuple[int, int] = (0, 0),
    pool: int = 0,
) -> DecoderConfig:
    """`fut_decoder_config` without a workspace; addresses may be left out where only sizes are asked for.

    The layers are part of the result and live as long as it does.
    """
    model = tensors.manifest.model
    layers = tensors.layers()
    return DecoderConfig(
        hidden=model.hidden_size,
        intermediate=model.intermediate_size,
        layers=model.num_layers,
        vocab=model.vocab_size,
        attention=AttentionShape(
            heads=model.num_heads,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            max_context=context_tokens,
            rms_norm_eps=model.rms_norm_eps,
            rope_cos=rope[0],
            rope_sin=rope[1],
        ),
        cache=KVCache(
            pool=pool,
            pages=pages,
            layers=model.num_layers,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            bits=cache.bits,
            rotation=int(cache.rotation),
            zero_point=int(cache.zero_point),
        ),
        embed=embed,
        layer=(Layer * len(layers))(*layers),
        head=tensors.head(),
        max_rows=MAX_ROWS,
        max_slots=MAX_SLOTS,
    )


def workspace_bytes(config: DecoderConfig) -> int:
    """Bytes that the library needs for its steps, logits included.

    Raises:
        UnsupportedError: there is no library here, or it does not support the model; the message says why.
    """
    nbytes = int(library().fut_decoder_workspace_bytes(ctypes.byref(config)))
    if nbytes < 0:
        reason = library().fut_last_error() or b"no reason given"
        raise UnsupportedError(f"the CUDA kernels do not support this model: {reason.decode(errors='replace')}")
    return nbytes


@dataclass(frozen=True)
class MemoryPlan:
    """Device memory for a model and its cache.

    Attributes:
        decode_mode: weights that are loaded.
        cache_bits: 4 or 16.
        context_tokens, requests: the cache is for so many tokens of each of so many requests.
        pages, page_bytes: the pages that takes, and the size of one.
        workspace_bytes: what a step needs, logits included; None where the library is not built.
        prefill_mode: weights of prompts, loaded beside those of decoding where they differ; `decode`: none.
        prefill_reason: why prompts take the decode path though nobody asked for it.
        history_pages, history_page_bytes: of the BF16 K and V of prompts that are being read.
        prefill_workspace_bytes: what a run of prompts needs; None where the library is not built.
    """

    decode_mode: str
    cache_bits: int
    context_tokens: int
    requests: int
    weights_bytes: int
    rope_bytes: int
    pages: int
    page_bytes: int
    logits_bytes: int
    workspace_bytes: int | None
    prefill_mode: str
    prefill_reason: str
    history_pages: int
    history_page_bytes: int
    prefill_workspace_bytes: int | None

    @property
    def history_bytes(self) -> int:
        """Bytes of the history's pages."""
        return self.history_pages * self.history_page_bytes

    @property
    def cache_bytes(self) -> int:
        """Bytes of the pool of pages."""
        return self.pages * self.page_bytes

    @property
    def total_bytes(self) -> int:
        """All of it; where the library is not built, with the logits for a workspace."""
        workspace = self.logits_bytes if self.workspace_bytes is None else self.workspace_bytes
        prompts = self.history_bytes + (self.prefill_workspace_bytes or 0)
        return self.weights_bytes + self.rope_bytes + self.cache_bytes + workspace + prompts


def plan_memory(
    artifact: Artifact,
    *,
    decode_mode: str | None = None,
    prefill_mode: str | None = None,
    kv_cache: str | None = None,
    context_tokens: int | None = None,
    requests: int = 1,
) -> MemoryPlan:
    """Plan the memory for `requests` requests of `context_tokens` tokens each (None: of the model's positions).

    Needs no card, and says more where the library is built.

    Raises:
        UnsupportedError: no such mode, or the artifact lacks its weights.
        FutError: more tokens than the model has positions, or no request.
    """
    manifest = artifact.manifest
    model = manifest.model
    limit = model.max_position_embeddings
    context_tokens = limit if context_tokens is None else context_tokens
    if not 1 <= context_tokens <= limit or requests < 1:
        raise FutError(
            f"a cache for {requests} requests of {context_tokens} tokens, expected at least one request of 1 to "
            f"{limit} tokens, the model's positions"
        )
    mode = choose_decode_mode(artifact, decode_mode)
    cache = choose_cache(manifest, kv_cache)
    weight_format = DECODE_FORMATS[mode]
    choice = choose_prefill_mode(manifest, prefill_mode, str(artifact.path))
    formats = loaded_formats(weight_format, choice)
    pages = requests * pages_for(context_tokens)
    config = decoder_config(
        DeviceTensors(manifest, weight_format, {}), cache, context_tokens=context_tokens, pages=pages
    )
    history_pages, prefill = 0, None
    if choice.weight_format is not None:
        history_pages = wanted_history_pages(context_tokens, requests)
        layers = DeviceTensors(manifest, choice.weight_format, {}).layers()
        rows = run_rows(context_tokens, requests)
        prefill = prefill_config(choice.mode, layers, config, history_pages=history_pages, rows=rows)
    workspace: int | None = None
    prefill_workspace: int | None = None
    try:
        workspace = workspace_bytes(config)
        prefill_workspace = 0 if prefill is None else prefill_workspace_bytes(prefill, config)
    except UnsupportedError:
        pass
    return MemoryPlan(
        decode_mode=mode,
        cache_bits=cache.bits,
        context_tokens=context_tokens,
        requests=requests,
        weights_bytes=ArenaPlan.of(needed_tensors(manifest, *formats)).nbytes,
        rope_bytes=rope_bytes(model, context_tokens),
        pages=pages,
        page_bytes=page_bytes(model, cache),
        logits_bytes=4 * MAX_ROWS * model.vocab_size,
        workspace_bytes=workspace,
        prefill_mode=choice.mode,
        prefill_reason=choice.reason,
        history_pages=history_pages,
        history_page_bytes=history_page_bytes(model),
        prefill_workspace_bytes=prefill_workspace,
    )
