"""GPTQ's loop over the columns of a matrix, and which of two programs runs the columns of a block."""

from __future__ import annotations

import warnings
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from fut_convert.quantize.rtn import CODE_OFFSET, HIGHEST, LOWEST, nonzero_divisor


def solve_columns(
    weight: Tensor, scales: Tensor, group_size: int, order: Tensor, upper: Tensor, block_size: int
) -> Tensor:
    """Codes uint8 [out, in], chosen column by column, the error of each made good by the columns that follow.

    Args:
        weight: float32 [out, in].
        scales: [out, in / group_size].
        order: int64 [in], the columns in the order of their quantization.
        upper: float32 [in, in], contiguous, U in that order.
        block_size: columns after which the rest of the matrix is updated.
    """
    # Transposed, so that a column is contiguous.
    rest = weight.T.index_select(0, order)
    steps = scales.to(torch.float32).T.contiguous()
    groups = torch.div(order, group_size, rounding_mode="floor").to(torch.int32)
    levels = torch.empty_like(rest, dtype=torch.int8)
    kernels = column_kernels(weight.device)
    run = _gptq_block if kernels is None else kernels.gptq_block
    for first in range(0, len(rest), block_size):
        block = rest[first : first + block_size]
        last = first + len(block)
        errors = torch.empty_like(block)
        run(block, upper[first:last, first:last], steps, groups[first:last], levels[first:last], errors)
        rest[last:].addmm_(upper[first:last, last:].T, errors, alpha=-1)
    codes = torch.empty_like(levels)
    codes[order] = levels.add_(CODE_OFFSET)
    return codes.view(torch.uint8).T.contiguous()


def _gptq_block(block: Tensor, upper: Tensor, steps: Tensor, groups: Tensor, levels: Tensor, errors: Tensor) -> None:
    """As `column_kernels.gptq_block`, but for what it leaves in `block`."""
    diagonal = upper.diagonal().tolist()
    divisors = nonzero_divisor(steps)
    for i, (column, group) in enumerate(zip(block, groups.tolist(), strict=True)):
        nearest = (column / divisors[group]).round_().clamp_(LOWEST, HIGHEST)
        levels[i] = nearest
        torch.sub(column, nearest.mul_(steps[group]), out=errors[i]).div_(diagonal[i])
        block[i + 1 :].addr_(upper[i, i + 1 :], errors[i], alpha=-1)


def column_kernels(device: torch.device) -> ModuleType | None:
    """The module `column_kernels` where it runs, else None: on a CPU, or where Triton is missing or cannot compile."""
    return _working_kernels(device) if device.type == "cuda" else None


@cache
def _working_kernels(device: torch.device) -> ModuleType | None:
    try:
        from fut_convert.quantize import column_kernels as kernels

        ones, groups = torch.ones(32, 32, device=device), torch.zeros(32, dtype=torch.int32, device=device)
        levels, errors = torch.zeros_like(ones, dtype=torch.int8), torch.ones_like(ones)
        kernels.gptq_block(ones, torch.eye(32, device=device), ones[:1].contiguous(), groups, levels, errors)
        if not (bool((levels == 1).all()) and bool((errors == 0).all())):
            raise RuntimeError("its kernels compute something else")
    except Exception as error:  # Triton raises what its compilers raise, a missing C compiler for instance
        warnings.warn(
            f"GPTQ takes one column after the other, several times as long: Triton does not run here ({error})",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return kernels
