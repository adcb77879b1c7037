"""Where activations are rounded, and to what: the table of `docs/numerics.md` as functions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_MAX = 448.0
#: Type of the 16-bit activations: residual stream, MMA operands of the decode path, Q, K, V and P.
ACTIVATION_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Numerics:
    """Compute type and rounding of a run.

    Attributes:
        dtype: type that sums and elementwise arithmetic run in. FP32, or FP64 for tests that need exact agreement.
        round_activations: True for the artifact's arithmetic (`exact`); False (`fp32`) leaves out every 16-bit
            rounding of activations and keeps what the format itself quantises: weights, E4M3 activations, the
            INT4 cache. Accuracy figures that isolate the format use the latter.
    """

    dtype: torch.dtype = torch.float32
    round_activations: bool = True

    def round16(self, x: Tensor) -> Tensor:
        """Round to the 16-bit activation type and return to the compute type; the identity under `fp32`."""
        return x.to(ACTIVATION_DTYPE).to(self.dtype) if self.round_activations else x


EXACT = Numerics()
FP32 = Numerics(round_activations=False)


def row_factor(h: Tensor, eps: float) -> Tensor:
    """RMSNorm's factor a row: 1 / sqrt(mean(h²) + eps), [tokens, 1] from h [tokens, hidden]."""
    return torch.rsqrt(h.square().mean(dim=-1, keepdim=True) + eps)


def true_divide(x: Tensor, divisor: float) -> Tensor:
    """x / divisor, correctly rounded on every device: CUDA multiplies by the reciprocal of a Python number."""
    return x / torch.full_like(x, divisor)


def to_e4m3(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise activations: E4M3 values of x / scale in x's dtype, and the number of saturated elements (int64).

    `scale` is one FP32 value. The reciprocal is taken once in FP32 and multiplied, as an epilogue does; conversions
    saturate at ±448, because E4M3 has no infinity and an overflow would become NaN.
    """
    scaled = x.to(torch.float32) * scale.to(torch.float32).reciprocal()
    saturated = (scaled.abs() > E4M3_MAX).sum()
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype), saturated
