"""INT4 quantisation of K and V for the decode cache: one scale and one zero point per token and KV head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fut_runtime.artifact.manifest import KVCacheSpec
from fut_runtime.reference.numerics import true_divide
from fut_runtime.reference.rotation import rotate

LEVELS = 15


@dataclass(frozen=True)
class QuantizedHeads:
    """Codes uint8 [tokens, heads, head_dim] in 0..15; scale and zero point BF16 [tokens, heads]: x ≈ scale·code + zero.

    The symmetric form has zero = -8·scale, which BF16 holds exactly.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Values [tokens, heads, head_dim], still rotated."""
        return self.codes.to(dtype) * self.scale.to(dtype)[..., None] + self.zero.to(dtype)[..., None]

    def tokens(self, count: int) -> QuantizedHeads:
        """The first `count` tokens."""
        return QuantizedHeads(self.codes[:count], self.scale[:count], self.zero[:count])


def quantize_heads(x: Tensor, spec: KVCacheSpec, signs: Tensor, *, rotated: bool = False) -> QuantizedHeads:
    """Quantise K (after RoPE) or V: x [tokens, heads, head_dim] in the compute dtype, `signs` the Hadamard block.

    `rotated` says that x has its rotation already, as V has where that is in the weights.
    Scale and zero point are rounded to BF16 before the codes are chosen, the zero point first, so that the scale
    spans what the rounded zero point leaves. A constant head gets scale 1 and codes 0.
    """
    if spec.rotation and not rotated:
        x = rotate(x, signs)
    low, high = x.amin(dim=-1), x.amax(dim=-1)
    if spec.zero_point:
        zero = low.to(torch.bfloat16)
        span = (high - zero.to(x.dtype)).clamp_min(0)
        scale = _positive(true_divide(span, LEVELS))
    else:
        scale = _positive(true_divide(torch.maximum(-low, high), 7))
        zero = -8 * scale
    codes = ((x - zero.to(x.dtype)[..., None]) / scale.to(x.dtype)[..., None]).round().clamp(0, LEVELS)
    return QuantizedHeads(codes.to(torch.uint8), scale, zero)


def _positive(scale: Tensor) -> Tensor:
    rounded = scale.to(torch.bfloat16)
    return torch.where(rounded > 0, rounded, torch.ones_like(rounded))
