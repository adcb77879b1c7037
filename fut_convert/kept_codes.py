"""INT4 codes that a quantized checkpoint brings and the artifact keeps: which modules, and reading them.

A module of the artifact stacks the rows of several matrices (q, k and v; gate and up). Rows do not share groups, so
their codes stack as they are. The RMSNorm's gain cannot be multiplied into codes, so it stays for run time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fut_convert.checkpoint_model import weight_names
from fut_convert.quantize.module import Int4Codes
from fut_convert.recipe import Recipe
from fut_convert.sources import Packing, Source
from fut_convert.sources.names import EMBEDDING, HEAD
from fut_runtime.artifact.manifest import WeightSpec
from fut_runtime.artifact.spec import MODULES, ModelSpec

#: What `method` and `scale_method` of kept codes begin with; the name of the format follows.
PACKED = "packed:"
#: Modules that a message names.
_NAMED = 3


@dataclass(frozen=True)
class KeptCodes:
    """How the kept codes of a module are stored; the fields are `WeightSpec`'s."""

    method: str
    group_size: int
    scale_dtype: str


@dataclass(frozen=True)
class KeptModules:
    """What becomes of a checkpoint's own INT4 codes.

    Attributes:
        modules: name in the artifact -> how the codes are stored, where they are kept.
        notes: what is kept, for the plan and the report.
        requantized: what is dequantized and quantized anew although it need not have been if it were stored otherwise.
    """

    modules: Mapping[str, KeptCodes]
    notes: tuple[str, ...] = ()
    requantized: tuple[str, ...] = ()


def plan_kept_codes(source: Source, recipe: Recipe) -> KeptModules:
    """Decide for each module whether its codes are kept; `int4.requantize` says what to do where there is a choice."""
    if not source.quantized:
        return KeptModules({})
    kept: dict[str, KeptCodes] = {}
    obstacles: dict[str, list[str]] = {}
    for name, matrices in _int4_modules(source.spec, recipe).items():
        if not any(matrix in source.quantized for matrix in matrices):
            continue
        found = _stacked([source.packing(matrix) for matrix in matrices])
        if found is not None and recipe.int4.requantize == "always":
            found = "the recipe asks for it (int4.requantize)"
        if isinstance(found, KeptCodes):
            kept[name] = found
        elif found is not None:
            obstacles.setdefault(found, []).append(name)
    title = source.tensors[min(source.quantized)].dtype
    notes = [
        f"the checkpoint holds {len(source.quantized)} matrices in {title}; all but kept codes is made of their "
        "dequantized values"
    ]
    notes += [
        f"{_modules(names)} {'keeps' if len(names) == 1 else 'keep'} the checkpoint's codes and scales "
        f"({how.method}, groups of {how.group_size}, scales in {how.scale_dtype}, gain at run time)"
        for how in dict.fromkeys(kept.values())
        for names in [[name for name in kept if kept[name] == how]]
    ]
    requantized = [
        f"{_modules(names)} {'is' if len(names) == 1 else 'are'} dequantized and quantized anew: {reason}"
        for reason, names in obstacles.items()
    ]
    return KeptModules(kept, tuple(notes), tuple(requantized))


def is_kept(spec: WeightSpec | None) -> bool:
    """Whether a module's codes are the checkpoint's own."""
    return spec is not None and (spec.method or "").startswith(PACKED)


def load_kept_codes(source: Source, names: Sequence[str], spec: WeightSpec, device: torch.device) -> Int4Codes:
    """The codes of the matrices that a module stacks, on the device.

    Raises:
        CheckpointError: a matrix cannot be read.
    """
    parts = [source.load_codes(name, spec.group_size or 0, spec.padded_shape[1]) for name in names]
    codes, scales = (torch.cat(tensors) if len(parts) > 1 else tensors[0] for tensors in zip(*parts, strict=True))
    return Int4Codes(codes.to(device), scales.to(device))


def head_name(model: ModelSpec) -> str:
    """Name of the matrix that the output head is made of."""
    return EMBEDDING if model.tie_word_embeddings else HEAD


def _int4_modules(model: ModelSpec, recipe: Recipe) -> dict[str, list[str]]:
    """Every module that is stored in INT4, and the matrices that it stacks."""
    modules: dict[str, list[str]] = {}
    if "int4" in recipe.weights:
        for layer in range(model.num_layers):
            modules |= {f"layers.{layer}.{module}": weight_names(layer, module) for module in MODULES}
    if recipe.head == "int4":
        modules["head"] = [head_name(model)]
    return modules


def _stacked(packings: Sequence[Packing | None]) -> KeptCodes | str | None:
    """How matrices can be stacked with their codes, or why they cannot; None where none of them has codes."""
    known = [packing for packing in packings if packing is not None]
    for packing in known:
        if packing.obstacle is not None:
            return packing.obstacle
    if not known:
        return None
    if len(known) < len(packings):
        return "only some of the matrices that they stack are quantized"
    if len({(packing.method, packing.scale_dtype) for packing in known}) > 1:
        return "the scales of the matrices that they stack have different types"
    common = [size for size in known[0].group_sizes if all(size in packing.group_sizes for packing in known)]
    return KeptCodes(known[0].method, common[0], known[0].scale_dtype)


def _modules(names: Sequence[str]) -> str:
    if len(names) <= _NAMED:
        return ", ".join(names)
    return f"{len(names)} modules ({', '.join(names[:_NAMED])}, …)"
