"""The column loops of GPTQ and of coordinate descent as Triton kernels: one launch a block of columns.

In PyTorch each column takes half a dozen launches that each do next to nothing. Rows do not know of each other, so here
a program takes some rows through all columns of a block, with the block in its registers. Importing this module needs
Triton, which comes with PyTorch's CUDA builds.

Nothing is fused or reordered: each column's values are rounded as in the loops in PyTorch on a CPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Rows a program takes: one for each lane of a warp, so that reads and writes are whole lines.
_ROWS = 32
#: Added and taken away again, this rounds a small FP32 number to the nearest integer, ties to the even one.
_ROUNDING = tl.constexpr(12582912.0)
_LOWEST, _HIGHEST = tl.constexpr(-8.0), tl.constexpr(7.0)


@triton.jit
def _nearest_level(value, step):
    """The level in -8..7 nearest to value / step, and 0 for a step of 0."""
    ratio = tl.where(step == 0.0, 0.0, tl.div_rn(value, tl.where(step == 0.0, 1.0, step)))
    return (tl.minimum(tl.maximum(ratio, _LOWEST), _HIGHEST) + _ROUNDING) - _ROUNDING


@triton.jit
def _gptq_kernel(
    block, upper, upper_stride, steps, groups, levels, errors, columns, rows, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    column = tl.arange(0, COLUMNS)
    known = column < columns
    place = column[:, None] * rows + row[None, :]
    rest = tl.load(block + place, mask=known[:, None] & inside[None, :], other=0.0)
    for i in range(columns):
        value = tl.sum(tl.where(column[:, None] == i, rest, 0.0), axis=0)
        group = tl.load(groups + i)
        step = tl.load(steps + group * rows + row, mask=inside, other=0.0)
        level = _nearest_level(value, step)
        feedback = tl.load(upper + i * upper_stride + column, mask=known & (column > i), other=0.0)
        error = tl.div_rn(value - level * step, tl.load(upper + i * upper_stride + i))
        rest -= feedback[:, None] * error[None, :]
        out = i * rows + row
        tl.store(levels + out, level.to(tl.int8), mask=inside)
        tl.store(errors + out, error, mask=inside)


@triton.jit
def _descent_kernel(
    gradient, hessian, hessian_stride, steps, groups, levels, lost, columns, rows,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    column = tl.arange(0, COLUMNS)
    known = column < columns
    place = column[:, None] * rows + row[None, :]
    slope = tl.load(gradient + place, mask=known[:, None] & inside[None, :], other=0.0)
    for i in range(columns):
        here = tl.sum(tl.where(column[:, None] == i, slope, 0.0), axis=0)
        group = tl.load(groups + i)
        step = tl.load(steps + group * rows + row, mask=inside, other=0.0)
        out = i * rows + row
        level = tl.load(levels + out, mask=inside, other=0.0)
        curvature = tl.load(hessian + i * hessian_stride + i)
        best = _nearest_level(level * step - tl.div_rn(here, curvature), step)
        change = (best - level) * step
        # A row of the symmetric matrix in place of its column.
        coupling = tl.load(hessian + i * hessian_stride + column, mask=known & (column > i), other=0.0)
        slope += coupling[:, None] * change[None, :]
        tl.store(levels + out, best, mask=inside)
        error = tl.load(lost + out, mask=inside, other=0.0)
        tl.store(lost + out, error + change, mask=inside)


def gptq_block(block: Tensor, upper: Tensor, steps: Tensor, groups: Tensor, levels: Tensor, errors: Tensor) -> None:
    """Choose the levels of a block of columns, each making good for the errors of those before it.

    Args:
        block: float32 [columns, rows], contiguous: the weights, corrected for the blocks before. Stays as it is.
        upper: float32 [columns, columns], U's part of these columns; its rows are contiguous.
        steps: float32 [groups, rows], contiguous: the scales.
        groups: int32 [columns], the group of each column.
        levels: int8 [columns, rows], contiguous: receives -8..7.
        errors: float32 [columns, rows], contiguous: receives what is to be taken from later columns.
    """
    columns, rows = block.shape
    with _on(block):
        _gptq_kernel[_grid(rows)](
            block, upper, upper.stride(0), steps, groups, levels, errors, columns, rows,
            COLUMNS=triton.next_power_of_2(columns), ROWS=_ROWS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def descent_block(
    gradient: Tensor, hessian: Tensor, steps: Tensor, groups: Tensor, levels: Tensor, lost: Tensor
) -> None:
    """Give each column of a block in turn the levels that are best for all the others as they are.

    Args:
        gradient: float32 [columns, rows], contiguous: the gradient of half the loss before. Stays as it is.
        hessian: float32 [columns, columns], symmetric, its part of these columns; its rows are contiguous.
        steps, groups: as for `gptq_block`.
        levels: float32 [columns, rows], contiguous, -8..7: replaced.
        lost: float32 [columns, rows], contiguous, level · step - weight: kept up to date.
    """
    columns, rows = gradient.shape
    with _on(gradient):
        _descent_kernel[_grid(rows)](
            gradient, hessian, hessian.stride(0), steps, groups, levels, lost, columns, rows,
            COLUMNS=triton.next_power_of_2(columns), ROWS=_ROWS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def _on(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's device the one that Triton launches on; in Triton's interpreter that may be a CPU."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _grid(rows: int) -> tuple[int]:
    return (triton.cdiv(rows, _ROWS),)
