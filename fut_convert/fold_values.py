"""The rotation of V in the INT4 cache, multiplied into W_v and W_o.

After Ashkboos et al. 2024, "QuaRot", section 4. With R the block-diagonal Hadamard rotation of a head (orthogonal,
symmetric), R v is what the cache holds, and attention puts out R o where it would put out o. So W_v' = R W_v (and
R b_v) and W_o' = W_o R give the same model, in which V need not be rotated at run time. q and k stay as they are: RoPE
stands between their products and their rotation.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fut_convert.checkpoint_model import LayerParts, Load, Rows, layer_parts, module_weight, rows_of
from fut_runtime.artifact.manifest import Manifest
from fut_runtime.artifact.spec import MODULES, ModelSpec
from fut_runtime.reference.rotation import rotate, sylvester_hadamard

#: Modules that the rotation changes.
FOLDED_MODULES = ("qkv", "o")


def folded_weights(load: Load, manifest: Manifest, layer: int) -> dict[str, Tensor]:
    """All matrices of a layer, as `fold_weight` has them."""
    return {m: fold_weight(module_weight(load, layer, m), manifest, m) for m in MODULES}


def folded_parts(load: Load, manifest: Manifest, layer: int) -> LayerParts:
    """What else a layer has, its biases as `fold_bias` has them."""
    parts = layer_parts(load, manifest.model, layer)
    return replace(parts, biases={m: fold_bias(bias, manifest, m) for m, bias in parts.biases.items()})


def fold_weight(weight: Tensor, manifest: Manifest, module: str) -> Tensor:
    """Weight [out, in] of a module as the manifest wants it: FP32 where the rotation is in it, else as given."""
    return fold_rows(rows_of(weight), manifest, module)(0, len(weight))


def fold_rows(rows: Rows, manifest: Manifest, module: str) -> Rows:
    """The same of its rows: only those that are needed are read."""
    if module not in FOLDED_MODULES or not manifest.kv_cache.v_folded:
        return rows
    model = manifest.model
    signs = sylvester_hadamard(model.rotation_block)
    if module == "o":
        # Its inputs are the heads, one after another.
        return lambda start, stop: rotate(rows(start, stop).to(torch.float32), signs)
    block, values = len(signs), _first_value(model)

    def qkv_rows(start: int, stop: int) -> Tensor:
        below = min(max(start, values), stop)
        parts = [rows(start, below).to(torch.float32)] if start < below else []
        if below < stop:
            # A row of V's becomes a sum over those of its block.
            first = values + (below - values) // block * block
            last = values + -(-(stop - values) // block) * block
            turned = _rotate_outputs(rows(first, last).to(torch.float32), signs)
            parts.append(turned[below - first : stop - first])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return qkv_rows


def fold_bias(bias: Tensor, manifest: Manifest, module: str) -> Tensor:
    """Bias FP32 [out] of a module as the manifest wants it: V's turns with V, that of `o` is added behind them."""
    if module != "qkv" or not manifest.kv_cache.v_folded:
        return bias
    model = manifest.model
    values = _first_value(model)
    turned = rotate(bias[values:], sylvester_hadamard(model.rotation_block))
    return torch.cat([bias[:values], turned])


def _first_value(model: ModelSpec) -> int:
    """The first row of V in `qkv`."""
    return (model.num_heads + model.num_kv_heads) * model.head_dim


def _rotate_outputs(weight: Tensor, signs: Tensor) -> Tensor:
    """R W: rows [whole blocks, in] rotated against each other."""
    return rotate(weight.T, signs).T
