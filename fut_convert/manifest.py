"""From a model and a recipe to the manifest: how every matrix will be stored."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from fut_convert.group_sizes import overridden_size
from fut_convert.kept_codes import KeptCodes
from fut_convert.recipe import AUTO, KVCacheRecipe, Recipe, uses_gptq
from fut_runtime.artifact.fragment import DEFAULT_SCALE_ORDER
from fut_runtime.artifact.layout import default_group_size, padded_e4m3_shape, padded_int4_shape
from fut_runtime.artifact.manifest import ActivationSpec, KVCacheSpec, Manifest, WeightSpec
from fut_runtime.artifact.spec import MODULES, ModelSpec

#: Projections whose input passes an RMSNorm: only these have a gain to fold or to leave to run time.
_AFTER_NORM = ("qkv", "gate_up", "head")


def build_manifest(
    model: ModelSpec,
    recipe: Recipe,
    *,
    source: Mapping[str, Any],
    side_files: Sequence[str] = (),
    calibration: Mapping[str, Any] | None = None,
    kept: Mapping[str, KeptCodes] | None = None,
) -> Manifest:
    """Manifest of the artifact that `recipe` makes of a model.

    Args:
        source: identity of the checkpoint, without paths.
        side_files: names of the files copied from the checkpoint.
        calibration: record of the calibration text, or None without calibration.
        kept: name of a module -> how its codes are stored, where they are the checkpoint's own.
    """
    kept = kept or {}
    modules = [(f"layers.{i}.{module}", module) for i in range(model.num_layers) for module in MODULES]
    weights = {
        name: {f: weight_spec(model, name, module, f, recipe, kept.get(name)) for f in recipe.weights}
        for name, module in modules
    }
    if not (model.tie_word_embeddings and recipe.head == "bf16"):
        weights["head"] = {recipe.head: weight_spec(model, "head", "head", recipe.head, recipe, kept.get("head"))}
    return Manifest(
        model=model,
        weights=weights,
        kv_cache=_kv_cache(recipe.kv_cache),
        activation=ActivationSpec(calibrated=calibration is not None, margin=float(recipe.activation.margin)),
        head=recipe.head,
        source=dict(source),
        recipe=recipe.to_dict(),
        tools=tool_versions(source, recipe),
        calibration=None if calibration is None else dict(calibration),
        side_files=tuple(side_files),
    )


def _kv_cache(recipe: KVCacheRecipe) -> KVCacheSpec:
    """The cache a recipe asks for. 16 bits have neither codes to rotate for nor zero points."""
    if recipe.bits == 16:
        return KVCacheSpec(bits=16, rotation=False, zero_point=False)
    return KVCacheSpec(recipe.bits, recipe.rotation, recipe.zero_point, recipe.fold_v)


def weight_spec(
    model: ModelSpec, name: str, module: str, weight_format: str, recipe: Recipe, kept: KeptCodes | None = None
) -> WeightSpec:
    """How a projection is stored in one format.

    Args:
        name: `layers.{i}.{module}`, or `head`.
        module: one of MODULES, or `head`.
        kept: where it keeps the checkpoint's INT4 codes.
    """
    shape = model.module_shape(module)
    paired = module == "gate_up"
    if weight_format != "int4":
        folded = "folded" if weight_format == "e4m3" else "runtime"
        return WeightSpec(
            format=weight_format,
            shape=shape,
            padded_shape=padded_e4m3_shape(shape),
            row_order="interleave1" if paired else "natural",
            gain=folded if module in _AFTER_NORM else "none",
            scale_dtype="float32" if weight_format == "e4m3" else None,
            method="rtn" if weight_format == "e4m3" else None,
            scale_method="absmax" if weight_format == "e4m3" else None,
        )
    int4 = recipe.int4
    group_size = _group_size(recipe, name, shape[1]) if kept is None else kept.group_size
    gain = int4.gain if kept is None else "runtime"
    return WeightSpec(
        format="int4",
        shape=shape,
        padded_shape=padded_int4_shape(shape, group_size, paired),
        row_order="interleave8" if paired else "natural",
        gain=gain if module in _AFTER_NORM else "none",
        group_size=group_size,
        scale_dtype=int4.scale_dtype if kept is None else kept.scale_dtype,
        nibble_order=int4.nibble_order,
        scale_order=DEFAULT_SCALE_ORDER,
        method=int4.method if kept is None else kept.method,
        scale_method=recipe.scale_method if kept is None else kept.method,
    )


def _group_size(recipe: Recipe, name: str, inputs: int) -> int:
    """Group size of a module whose codes are chosen by the recipe."""
    own = overridden_size(recipe.int4.group_size_overrides, name)
    if own is not None:
        return own
    return default_group_size(inputs) if recipe.int4.group_size == AUTO else int(recipe.int4.group_size)


def solved_by_gptq(manifest: Manifest) -> bool:
    """Whether the codes of any module are chosen by GPTQ."""
    return any(spec.method == "gptq" for formats in manifest.weights.values() for spec in formats.values())


def tool_versions(source: Mapping[str, Any], recipe: Recipe) -> dict[str, str]:
    """Versions that decide what the sealed bytes are; a GGUF's weights are what its package dequantizes them to."""
    names = ["futransformer", "torch", "tokenizers"]
    if source.get("kind") == "gguf":
        names += ["gguf", "numpy"]
    if uses_gptq(recipe) and recipe.gptq.solver == "auto-gptq":
        names.append("auto-gptq")
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions
