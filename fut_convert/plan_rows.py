"""The table of a plan: how each kind of module is stored."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fut_convert.kept_codes import is_kept
from fut_convert.recipe import AUTO, Recipe
from fut_runtime.artifact.layout import TensorSpec, all_tensors, default_group_size
from fut_runtime.artifact.manifest import Manifest, WeightSpec
from fut_runtime.artifact.spec import MODULES


@dataclass(frozen=True)
class ModuleRow:
    """One line of the plan's table: a module in one format, in all layers that store it alike.

    `layers` is how many they are, None where the module is in no layer; `bytes` is for all of them; `bits_per_weight`
    counts scales and padding against the true number of weights.
    """

    module: str
    layers: int | None
    format: str
    shape: tuple[int, int]
    padded_shape: tuple[int, int]
    group_size: int | None
    gain: str
    scale_method: str | None
    bytes: int
    bits_per_weight: float


def module_rows(manifest: Manifest) -> list[ModuleRow]:
    """The rows of a plan, in the artifact's order."""
    layers = manifest.model.num_layers
    sizes: dict[tuple[str, str], int] = {}
    for tensor in all_tensors(manifest):
        owner, _, suffix = tensor.name.rpartition(".")
        sizes[owner, suffix.removesuffix("_scale")] = (
            sizes.get((owner, suffix.removesuffix("_scale")), 0) + tensor.nbytes
        )
    rows = []
    # Modules of a quantized checkpoint need not be stored alike in all layers.
    for module in (*MODULES, "head"):
        names = ["head"] if module == "head" else [f"layers.{layer}.{module}" for layer in range(layers)]
        kinds: dict[tuple[str, WeightSpec], int] = {}
        for name in names:
            for weight_format, spec in manifest.weights.get(name, {}).items():
                kinds[weight_format, spec] = kinds.get((weight_format, spec), 0) + sizes[name, weight_format]
        formats = [weight_format for weight_format, _ in kinds]
        for (weight_format, spec), stored in sorted(kinds.items(), key=lambda kind: formats.index(kind[0][0])):
            alike = sum(spec == manifest.weights[name].get(weight_format) for name in names)
            rows.append(
                ModuleRow(
                    module=module,
                    layers=None if module == "head" else alike,
                    format=weight_format,
                    shape=spec.shape,
                    padded_shape=spec.padded_shape,
                    group_size=spec.group_size,
                    gain=spec.gain,
                    scale_method=spec.scale_method,
                    bytes=stored,
                    bits_per_weight=8 * stored / (alike * math.prod(spec.shape)),
                )
            )
    embed = next(t for t in all_tensors(manifest) if t.name == "embed")
    rows.append(_embedding_row(embed))
    return rows


def _embedding_row(embed: TensorSpec) -> ModuleRow:
    shape = (embed.shape[0], embed.shape[1])
    return ModuleRow("embed", None, "bf16", shape, shape, None, "none", None, embed.nbytes, 16.0)


def padding_warnings(manifest: Manifest, recipe: Recipe) -> list[str]:
    """A message for each module whose group size does not divide its input, with the sizes that do."""
    messages = []
    stored = [(name.rpartition(".")[2], formats.get("int4")) for name, formats in manifest.weights.items()]
    for module, spec in dict.fromkeys(stored):
        if spec is None or is_kept(spec) or spec.group_size is None or spec.shape[1] % spec.group_size == 0:
            continue
        cols = spec.shape[1]
        dividing = [g for g in (32, 64, 128) if cols % g == 0]
        own = spec.group_size not in (recipe.int4.group_size, default_group_size(cols))
        option = "" if own else "--group-size "
        remedy = f"; {option}{' or '.join(map(str, dividing))} divides it" if dividing else ""
        forced = "" if recipe.int4.group_size == AUTO and not own else " as forced"
        messages.append(
            f"{module}: group size {spec.group_size}{forced} does not divide its {cols} inputs, which are padded to "
            f"{spec.padded_shape[1]}{remedy}"
        )
    return messages
