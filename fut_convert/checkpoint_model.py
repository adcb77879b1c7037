"""A checkpoint's own weights as reference layers: for calibration, and as the baseline of accuracy figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from fut_convert.sources import Source
from fut_convert.sources.names import MODULE_PROJECTIONS
from fut_runtime.artifact.manifest import KVCacheSpec
from fut_runtime.artifact.spec import ModelSpec
from fut_runtime.reference.layer import LayerWeights
from fut_runtime.reference.model import ReferenceModel
from fut_runtime.reference.numerics import FP32, Numerics
from fut_runtime.reference.projection import Projection

#: RMSNorm whose gain the module's input carries.
MODULE_NORM: dict[str, str] = {"qkv": "input_layernorm", "gate_up": "post_attention_layernorm"}

Load = Callable[[str], Tensor]
#: Rows `start` to `stop` (exclusive) of a matrix.
Rows = Callable[[int, int], Tensor]


class Checkpoint(Protocol):
    """What this module needs of a source."""

    @property
    def spec(self) -> ModelSpec: ...

    def load(self, name: str) -> Tensor: ...


def module_weight(load: Load, layer: int, module: str) -> Tensor:
    """Stacked weight [out, in] of a module in the checkpoint's dtype, natural row order."""
    parts = [load(name) for name in weight_names(layer, module)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def rows_of(matrix: Tensor) -> Rows:
    """Rows of a matrix in memory."""
    return lambda start, stop: matrix[start:stop]


def stacked_rows(source: Source, names: Sequence[str]) -> Rows:
    """Reads rows of the matrix that stacks those of the given names, without holding it where it is not quantized."""
    places: list[tuple[Rows, int, int]] = []
    end = 0
    for name in names:
        begin, end = end, end + source.tensors[name].shape[0]
        # A quantized matrix is dequantized as a whole, so once for all its rows.
        rows_of_part = rows_of(source.load(name)) if name in source.quantized else partial(source.load_rows, name)
        places.append((rows_of_part, begin, end))

    def rows(start: int, stop: int) -> Tensor:
        parts = [
            rows_of_part(max(start, begin) - begin, min(stop, end) - begin)
            for rows_of_part, begin, end in places
            if start < end and begin < stop
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return rows


def weight_names(layer: int, module: str) -> list[str]:
    """Names of the weights that a module stacks."""
    return [f"model.layers.{layer}.{part}.weight" for part in MODULE_PROJECTIONS[module]]


def module_bias(load: Load, layer: int, module: str) -> Tensor:
    """Stacked bias FP32 [out] of a module."""
    return torch.cat([load(f"model.layers.{layer}.{part}.bias").float() for part in MODULE_PROJECTIONS[module]])


def module_gain(load: Load, layer: int, module: str) -> Tensor | None:
    """RMSNorm gain FP32 [in] before a module, or None where no norm precedes it."""
    norm = MODULE_NORM.get(module)
    return None if norm is None else load(f"model.layers.{layer}.{norm}.weight").float()


@dataclass(frozen=True)
class LayerParts:
    """What a layer has besides its matrices, all FP32.

    Attributes:
        gains: module -> [in] of the RMSNorm before it, where there is one.
        biases: module -> [out], where it has one.
        head_norms: [head_dim] each, Qwen3's gains of q and k, or None.
    """

    gains: dict[str, Tensor]
    biases: dict[str, Tensor]
    head_norms: tuple[Tensor, Tensor] | None


def layer_parts(load: Load, model: ModelSpec, layer: int) -> LayerParts:
    """Read them."""
    gains = {m: g for m in MODULE_PROJECTIONS if (g := module_gain(load, layer, m)) is not None}
    biases = {m: module_bias(load, layer, m) for m in MODULE_PROJECTIONS if model.module_bias(m)}
    if not model.qk_norm:
        return LayerParts(gains, biases, None)
    q_norm, k_norm = (load(f"model.layers.{layer}.self_attn.{n}_norm.weight").float() for n in "qk")
    return LayerParts(gains, biases, (q_norm, k_norm))


def layer_from_checkpoint(
    spec: ModelSpec, load: Load, layer: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> LayerWeights:
    """One layer with the checkpoint's weights in `dtype` and the gains applied at run time."""
    lazy = lazy_layer_from_checkpoint(spec, load, layer, device=device)
    held = {m: replace(p, weight=p.matrix().to(dtype)) for m, p in lazy.projections.items()}
    return replace(lazy, projections=held)


def lazy_layer_from_checkpoint(
    spec: ModelSpec, load: Load, layer: int, *, device: torch.device | str = "cpu"
) -> LayerWeights:
    """The same with each matrix read when it is used, in the checkpoint's dtype, and dropped again."""
    projections: dict[str, Projection] = {}
    for module in MODULE_PROJECTIONS:
        gain = module_gain(load, layer, module)
        projections[module] = Projection(
            weight=partial(_matrix_on, device, load, layer, module),
            gain=None if gain is None else gain.to(device),
            bias=module_bias(load, layer, module).to(device) if spec.module_bias(module) else None,
        )
    norms: list[Tensor | None] = [None, None]
    if spec.qk_norm:
        norms = [load(f"model.layers.{layer}.self_attn.{n}_norm.weight").float().to(device) for n in ("q", "k")]
    return LayerWeights(projections, q_norm=norms[0], k_norm=norms[1])


def _matrix_on(device: torch.device | str, load: Load, layer: int, module: str) -> Tensor:
    parts = [load(name).to(device) for name in weight_names(layer, module)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def model_from_checkpoint(
    source: Checkpoint, *, device: torch.device | str = "cpu", numerics: Numerics = FP32
) -> ReferenceModel:
    """The whole checkpoint as a reference model: its weights, a 16-bit cache, no quantisation anywhere."""
    spec, load = source.spec, source.load
    layers = [layer_from_checkpoint(spec, load, i, device=device, dtype=numerics.dtype) for i in range(spec.num_layers)]
    embed = load("model.embed_tokens.weight").to(device)
    head = embed if spec.tie_word_embeddings else load("lm_head.weight").to(device)
    return ReferenceModel(
        spec=spec,
        embed=embed,
        prefill=layers,
        decode=layers,
        head=Projection(head.to(numerics.dtype), gain=load("model.norm.weight").float().to(device)),
        kv_cache=KVCacheSpec(bits=16, rotation=False, zero_point=False),
        numerics=numerics,
    )
