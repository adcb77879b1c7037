"""One weight matrix as the reference backend multiplies with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Projection:
    """y = x @ weightᵀ · channel_scale + bias, in natural row order and true shape.

    Attributes:
        weight: [out, in], or a function that makes it: large models are dequantised when they are used instead of
            being held in FP32. For E4M3 these are the codes' values, without the channel scale.
        channel_scale: FP32 [out] for E4M3, else None. It is applied to the accumulator.
        gain: FP32 [in] of the RMSNorm before it, where it is applied to the activation; None where it is in the
            weights or no norm precedes.
        bias: FP32 [out] or None.
    """

    weight: Tensor | Callable[[], Tensor]
    channel_scale: Tensor | None = None
    gain: Tensor | None = None
    bias: Tensor | None = None

    def accumulate(self, x: Tensor) -> Tensor:
        """Accumulator of x [tokens, in] times the weights, before any scale: [tokens, out] in x's dtype."""
        return x @ self.matrix().to(x.dtype).T

    def matrix(self) -> Tensor:
        """The weight [out, in], made where it is not held."""
        return self.weight if isinstance(self.weight, Tensor) else self.weight()

    def finish(self, accumulator: Tensor, factor: Tensor | None = None) -> Tensor:
        """Apply a row or scalar factor and the channel scale, then add the bias: the order of every epilogue."""
        if factor is not None:
            accumulator = accumulator * factor
        if self.channel_scale is not None:
            accumulator = accumulator * self.channel_scale.to(accumulator.dtype)
        return accumulator if self.bias is None else accumulator + self.bias.to(accumulator.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Product with 16-bit activations: accumulate, scale, bias."""
        return self.finish(self.accumulate(x))


def normalized(h: Tensor, factor: Tensor, gain: Tensor | None) -> Tensor:
    """RMSNorm's output before rounding: factor·h, times the gain where that is applied at run time."""
    x = h * factor
    return x if gain is None else x * gain.to(torch.promote_types(x.dtype, torch.float32))
