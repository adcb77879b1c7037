"""Coordinate descent on INT4 codes: each code in turn becomes the best one for all the others as they are.

Behdin et al. 2023, "QuantEase: Optimization-based Quantization for Language Models", section 3. With E = Ŵ - W the row
loses eHeᵀ; of column j alone that is a parabola in ŵ_j whose least value lies at ŵ_j - (eH)_j / H_jj, so the code
nearest to it is exactly the best. GPTQ decides each column once, knowing nothing of the columns after it; this looks
back. The loss never rises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fut_convert.quantize.columns import column_kernels
from fut_convert.quantize.rtn import CODE_OFFSET, HIGHEST, LOWEST, nonzero_divisor


def refine_codes(
    weight: Tensor, codes: Tensor, scales: Tensor, group_size: int, hessian: Tensor, *, sweeps: int, block_size: int
) -> Tensor:
    """Codes uint8 [out, in] of a loss no greater than that of the codes given, but for rounding.

    Args:
        weight: float32 [out, in].
        codes: uint8 [out, in], values 0..15, with `scales` [out, in / group_size].
        hessian: float32 [in, in] with a positive diagonal: damped as for GPTQ, or codes fit the calibration text
            better and other texts worse.
        sweeps: passes over all columns.
        block_size: columns after which the gradient of the next ones is computed anew.
    """
    # Transposed, so that a column is contiguous.
    steps = scales.to(torch.float32).T.contiguous()
    groups = torch.div(torch.arange(len(hessian), device=weight.device), group_size, rounding_mode="floor").int()
    levels = codes.T.to(torch.float32).sub_(CODE_OFFSET).contiguous()
    lost = (levels.unflatten(0, (-1, group_size)) * steps[:, None]).flatten(0, 1).sub_(weight.T)
    kernels = column_kernels(weight.device)
    run = _descent_block if kernels is None else kernels.descent_block
    for _ in range(sweeps):
        for first in range(0, len(lost), block_size):
            last = min(first + block_size, len(lost))
            gradient = hessian[first:last] @ lost
            inside = hessian[first:last, first:last]
            run(gradient, inside, steps, groups[first:last], levels[first:last], lost[first:last])
    return levels.add_(CODE_OFFSET).to(torch.uint8).T.contiguous()


def _descent_block(
    gradient: Tensor, hessian: Tensor, steps: Tensor, groups: Tensor, levels: Tensor, lost: Tensor
) -> None:
    """As `column_kernels.descent_block`, but for what it leaves in `gradient`."""
    diagonal = hessian.diagonal().tolist()
    divisors = nonzero_divisor(steps)
    for i, (level, group) in enumerate(zip(levels, groups.tolist(), strict=True)):
        wanted = (level * steps[group]).sub_(gradient[i], alpha=1 / diagonal[i])
        best = wanted.div_(divisors[group]).round_().clamp_(LOWEST, HIGHEST)
        change = (best - level).mul_(steps[group])
        level.copy_(best)
        lost[i] += change
        gradient[i + 1 :].addr_(hessian[i + 1 :, i], change)
