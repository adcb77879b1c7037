"""The weight that GPTQ quantizes behind modules that are quantized already: one that makes good for their error.

After Li et al. 2025, "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration", section 4, and Zhang
et al. 2025, "Qronos". GPTQ keeps W x, the output for the input x that arrives behind quantized modules. What the model
needs is t, what the checkpoint's own module makes of its own input x₀. Where the output is added to the residual
stream, t = W x₀ + h₀ - h makes good for what the stream itself has lost as well. With H the mean of xxᵀ and T that of
txᵀ,

    E|t - V x|² = const + tr((V - W*) H (V - W*)ᵀ),   W* = T H⁻¹ = W + (T - W H) H⁻¹,

so quantizing W* by GPTQ with the same H is all there is to it. Half of the way to W* is better than all of it on texts
that calibration has not seen: docs/accuracy.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fut_convert.quantize.gptq import HessianFactor, error_chunk


def corrected_weight(weight: Tensor, hessian: Tensor, wanted: Tensor, factor: HessianFactor, share: float) -> Tensor:
    """W + share · (T - W H)(H + λI)⁻¹, float32 [out, in].

    Args:
        weight: float32 [out, in], W.
        hessian: float32 or float64 [in, in], H, the mean of xxᵀ.
        wanted: float32 [out, in], T, the mean of txᵀ over the same inputs.
        factor: of H + λI, from `factorize`.
        share: how much of the way to go, 0 to 1.
    """
    # (H + λI)⁻¹ = UᵀU, with columns in GPTQ's order.
    change = _difference(weight, hessian, wanted)[:, factor.order]
    change = change @ factor.upper.T
    change = change @ factor.upper
    return torch.add(weight, change[:, torch.argsort(factor.order)], alpha=share)


def _difference(weight: Tensor, hessian: Tensor, wanted: Tensor) -> Tensor:
    """T - W H, float32 [out, in]. The two are nearly equal, so the product takes FP64, a panel of H at a time."""
    rows, columns = weight.shape
    missing = torch.empty_like(weight)
    width = height = max(1, error_chunk(weight.device) // columns)
    for left in range(0, columns, width):
        panel = hessian[:, left : left + width].double()
        for top in range(0, rows, height):
            part = (slice(top, top + height), slice(left, left + width))
            missing[part] = wanted[part] - weight[part[0]].double() @ panel
    return missing
