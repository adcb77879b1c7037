"""Which weights prompts run through on a card, and how prefill is told of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fut_runtime.artifact.manifest import Manifest
from fut_runtime.artifact.rows import to_stored_rows
from fut_runtime.artifact.spec import MODULES
from fut_runtime.cuda.structs import Layer
from fut_runtime.cuda.tensors import DeviceTensors
from fut_runtime.errors import UnsupportedError

#: Modes that have kernels of their own, the preferred one first, and the weights they need; `decode` needs none.
PREFILL_FORMATS: dict[str, str] = {"e4m3": "e4m3", "bf16": "bf16"}
PREFILL_MODES: tuple[str, ...] = (*PREFILL_FORMATS, "decode")
#: Columns that the kernels read at once.
_HIDDEN_MULTIPLE = 8


@dataclass(frozen=True)
class PrefillChoice:
    """How prompts are read.

    Attributes:
        mode: `e4m3`, `bf16` or `decode`.
        reason: why prompts take the decode path though nobody asked for it; else empty.
    """

    mode: str
    reason: str = ""

    @property
    def weight_format(self) -> str | None:
        """Format of the weights that prefill reads; None on the decode path."""
        return PREFILL_FORMATS.get(self.mode)


def choose_prefill_mode(manifest: Manifest, prefill_mode: str | None, about: str = "the artifact") -> PrefillChoice:
    """The prefill mode asked for, or the first whose weights the artifact has; else the decode path.

    Args:
        about: the artifact, for messages.

    Raises:
        UnsupportedError: no such mode, or the artifact lacks what it needs.
    """
    if prefill_mode is not None and prefill_mode not in PREFILL_MODES:
        raise UnsupportedError(f"prefill_mode is {prefill_mode!r}, expected one of {', '.join(PREFILL_MODES)}")
    if prefill_mode == "decode":
        return PrefillChoice("decode")
    wanted = list(PREFILL_FORMATS) if prefill_mode is None else [prefill_mode]
    problems = {mode: _problem(manifest, mode) for mode in wanted}
    for mode, problem in problems.items():
        if problem is None:
            return PrefillChoice(mode)
    reason = "; ".join(f"{mode} needs {problem}" for mode, problem in problems.items())
    if prefill_mode is None:
        return PrefillChoice("decode", reason)
    raise UnsupportedError(
        f"{about}: prefill_mode {reason}: choose prefill_mode decode, or convert again with --weights including "
        f"{PREFILL_FORMATS[prefill_mode]}"
    )


def _problem(manifest: Manifest, mode: str) -> str | None:
    """What a mode needs and the artifact lacks; None where it has everything."""
    weight_format = PREFILL_FORMATS[mode]
    model = manifest.model
    if model.hidden_size % _HIDDEN_MULTIPLE:
        return f"a hidden size that is a multiple of {_HIDDEN_MULTIPLE}, not {model.hidden_size}"
    stored = [manifest.weights[f"layers.{i}.{m}"] for i in range(model.num_layers) for m in MODULES]
    if not all(weight_format in formats for formats in stored):
        return f"every projection in {weight_format}"
    if mode == "e4m3" and any(formats[weight_format].gain == "runtime" for formats in stored):
        return "E4M3 weights with the norms' gains in them"
    return None


def prefill_layers(tensors: DeviceTensors) -> tuple[list[Layer], list[Tensor]]:
    """`fut_layer` of every layer for prefill, and tensors made for them, which must live as long.

    The biases of gate_up stand in the order of its stored rows, gate and up in turn.
    """
    manifest, made = tensors.manifest, []
    views = dict(tensors.tensors)
    for i in range(manifest.model.num_layers):
        name = f"layers.{i}.gate_up"
        bias = views.get(f"{name}.bias")
        if bias is not None:
            spec = manifest.weights[name][tensors.weight_format]
            views[f"{name}.bias"] = to_stored_rows(bias, spec.row_order, spec.padded_shape[0]).contiguous()
            made.append(views[f"{name}.bias"])
    return DeviceTensors(manifest, tensors.weight_format, views).layers(), made
