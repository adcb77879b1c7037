"""One decoder layer, in the two arithmetics of the contract: 16-bit activations, and E4M3 activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu

from fut_runtime.artifact.spec import ModelSpec
from fut_runtime.reference.activation_scale import ActivationScales
from fut_runtime.reference.attention import attend
from fut_runtime.reference.numerics import Numerics, row_factor
from fut_runtime.reference.projection import Projection, normalized
from fut_runtime.reference.rope import apply_rope

#: Called as observer(site, product_input, stored): see `Sixteen`.
Observer = Callable[[str, Tensor, Tensor], None]


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer: `projections` by module, and the per-head gains FP32 [head_dim] of Qwen3's q/k norms."""

    projections: Mapping[str, Projection]
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


class Products(Protocol):
    """How the projections of a layer see their input."""

    def after_norm(self, layer: LayerWeights, module: str, h: Tensor) -> Tensor:
        """Projection of RMSNorm(h): `qkv` and `gate_up`."""
        ...

    def plain(self, layer: LayerWeights, module: str, x: Tensor) -> Tensor:
        """Projection of x as it is: `o` and `down`."""
        ...


@dataclass(frozen=True)
class Sixteen:
    """16-bit activations: the decode path, BF16 prefill, and the checkpoint itself.

    The normalised activation ρ·h·γ is rounded once, to 16 bits. `observer` sees each site's input in the compute
    type: (site, ρ·h before the gain, h) for `qkv` and `gate_up`, and (site, x, x) for `o` and `down`; all [tokens, in].
    """

    numerics: Numerics
    eps: float
    observer: Observer | None = None

    def after_norm(self, layer: LayerWeights, module: str, h: Tensor) -> Tensor:
        projection = layer.projections[module]
        factor = row_factor(h, self.eps)
        if self.observer is not None:
            self.observer(module, h * factor, h)
        return projection(self.numerics.round16(normalized(h, factor, projection.gain)))

    def plain(self, layer: LayerWeights, module: str, x: Tensor) -> Tensor:
        if self.observer is not None:
            self.observer(module, x, x)
        return layer.projections[module](self.numerics.round16(x))


@dataclass(frozen=True)
class EightBit:
    """E4M3 activations and E4M3 weights with the gain folded in: the FP8 prefill path.

    `qkv` and `gate_up` multiply the stored E4M3 copy of h; ρ and the activation scale reach the accumulator in the
    epilogue, so the normalised activation exists nowhere.
    """

    scales: ActivationScales
    index: int
    eps: float

    def after_norm(self, layer: LayerWeights, module: str, h: Tensor) -> Tensor:
        projection = layer.projections[module]
        values, scale = self.scales.quantize(self.index, module, h)
        return projection.finish(projection.accumulate(values), row_factor(h, self.eps) * scale.to(h.dtype))

    def plain(self, layer: LayerWeights, module: str, x: Tensor) -> Tensor:
        projection = layer.projections[module]
        values, scale = self.scales.quantize(self.index, module, x)
        return projection.finish(projection.accumulate(values), scale.to(x.dtype))


#: attend(q, k, v) -> output, all [tokens, heads, head_dim]: stores K and V where they belong and attends.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def run_layer(
    model: ModelSpec,
    layer: LayerWeights,
    products: Products,
    numerics: Numerics,
    h: Tensor,
    rope: tuple[Tensor, Tensor],
    attend_to: Attend | None = None,
) -> Tensor:
    """Run one decoder layer over the tokens of one request.

    Args:
        h: residual stream [tokens, hidden] in the compute type.
        rope: cosines and sines of the tokens' positions, from `rope_tables`.
        attend_to: attention including the cache write; None attends causally among the given tokens alone.

    Returns:
        The residual stream after the layer, rounded to 16 bits unless the numerics say otherwise.
    """
    h = numerics.round16(
        h + products.plain(layer, "o", attention(model, layer, products, numerics, h, rope, attend_to))
    )
    return numerics.round16(h + products.plain(layer, "down", gated(layer, products, h)))


def attention(
    model: ModelSpec,
    layer: LayerWeights,
    products: Products,
    numerics: Numerics,
    h: Tensor,
    rope: tuple[Tensor, Tensor],
    attend_to: Attend | None = None,
) -> Tensor:
    """The first half of `run_layer` up to what `o` multiplies: [tokens, heads · head_dim]."""
    qkv = products.after_norm(layer, "qkv", h)
    q, k, v = qkv.unflatten(-1, (-1, model.head_dim)).split(
        (model.num_heads, model.num_kv_heads, model.num_kv_heads), dim=1
    )
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = head_norm(q, layer.q_norm, model.rms_norm_eps), head_norm(k, layer.k_norm, model.rms_norm_eps)
    q, k = apply_rope(q, *rope), apply_rope(k, *rope)
    if attend_to is None:
        q, k, v = numerics.round16(q), numerics.round16(k), numerics.round16(v)
        return attend(q, k, v, numerics).flatten(1)
    return attend_to(q, k, v).flatten(1)


def gated(layer: LayerWeights, products: Products, h: Tensor) -> Tensor:
    """The second half of `run_layer` up to what `down` multiplies: silu(gate) · up, [tokens, intermediate]."""
    gate, up = products.after_norm(layer, "gate_up", h).chunk(2, dim=-1)
    return silu(gate) * up


def head_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm of each head over head_dim: x [tokens, heads, head_dim], gain FP32 [head_dim]."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * gain.to(x.dtype)
