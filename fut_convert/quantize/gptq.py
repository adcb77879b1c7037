"""GPTQ: INT4 codes chosen column by column, the error of each made good by the columns that follow.

Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", section 3.
With x the input of the product and H the mean of xxᵀ, row w loses (w - ŵ) H (w - ŵ)ᵀ of its output. Let (H + λI)⁻¹ =
UᵀU with U upper triangular. Rounding column j with error e leaves least if e · U[j, k] / U[j, j] is taken from every
later column k before that one is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fut_convert.quantize.columns import solve_columns
from fut_convert.quantize.refine import refine_codes
from fut_convert.quantize.rtn import rtn_int4
from fut_convert.quantize.triangular import invert_lower
from fut_runtime.artifact.fragment import dequantize_int4

#: What damping that is too small is multiplied by, and the largest that is tried: at the mean of the diagonal what is
#: left of the Hessian's structure is not worth having.
DAMPING_STEP = 10.0
MOST_DAMPING = 1.0
#: See `error_chunk`.
_ERROR_CHUNK = {"cpu": 1 << 22, "cuda": 1 << 26}


@dataclass(frozen=True)
class GptqSettings:
    """How GPTQ runs.

    Attributes:
        damping: λ, as a share of the mean of the Hessian's diagonal; raised tenfold until the Hessian is definite.
        act_order: quantize the columns of the largest activations first, while the others can still make good for
            them. Groups are static: every column keeps its place and the scale of its group.
        block_size: columns after which the rest of the matrix is updated; of no influence but rounding.
        sweeps: passes of coordinate descent over the codes afterwards, see `refine_codes`.
        correction: share of the earlier modules' error that a matrix makes good for, see `corrected_weight`.
    """

    damping: float = 0.01
    act_order: bool = True
    block_size: int = 128
    sweeps: int = 1
    correction: float = 0.5


@dataclass(frozen=True)
class GptqResult:
    """Codes of a matrix and how they came about.

    Attributes:
        codes: uint8 [out, in], values 0..15.
        damping: λ that was used, a share of the mean of the diagonal; None after a fallback.
        fallback: why the whole matrix was rounded to nearest instead, or None.
        nearest_rows: rows for which rounding to nearest was better, and was kept.
        weighted_error: tr((W - Ŵ) H (W - Ŵ)ᵀ) / tr(W H Wᵀ), the squared relative error of the output.
    """

    codes: Tensor
    damping: float | None
    fallback: str | None
    nearest_rows: int
    weighted_error: float


@dataclass(frozen=True)
class HessianFactor:
    """A factorised Hessian.

    Attributes:
        order: int64 [in], columns in the order of their quantization.
        upper: float32 [in, in], U in that order.
        damping: λ that made it definite, as a share of the mean of the diagonal.
    """

    order: Tensor
    upper: Tensor
    damping: float


def gptq_int4(
    weight: Tensor, hessian: Tensor, scales: Tensor, group_size: int, settings: GptqSettings | None = None
) -> GptqResult:
    """Codes that keep the output: weight ≈ (code - 8) · scale of its group.

    Args:
        weight: float32 [out, in], `in` a multiple of `group_size`.
        hessian: float32 or float64 [in, in], symmetric: the sum or mean of xxᵀ over the inputs of the product. A column
            that was never active (zero on the diagonal) is rounded to nearest.
        scales: [out, in / group_size], already in their storage type, of either sign.
        group_size: neighbouring weights of a row that share a scale.

    Raises:
        ValueError: the Hessian has the wrong shape or holds values that are not finite.
    """
    settings = settings or GptqSettings()
    columns = weight.shape[1]
    if hessian.shape != (columns, columns):
        raise ValueError(f"the Hessian of {columns} inputs is {list(hessian.shape)}, expected {[columns, columns]}")
    if not bool(torch.isfinite(hessian).all()):
        raise ValueError("the Hessian holds values that are not finite")
    return solve_int4(weight, hessian, scales, group_size, settings, factorize(hessian, settings))


def solve_int4(
    weight: Tensor,
    hessian: Tensor,
    scales: Tensor,
    group_size: int,
    settings: GptqSettings,
    factor: HessianFactor | None,
) -> GptqResult:
    """`gptq_int4` with what `factorize` makes of the Hessian."""
    codes = rtn_int4(weight, scales, group_size)
    total = row_errors(weight, None, scales, group_size, hessian).sum()
    rounded = row_errors(weight, codes, scales, group_size, hessian)
    if factor is None:
        return GptqResult(codes, None, indefinite(), len(weight), error_share(rounded, total))
    damping = factor.damping
    solved = solve_columns(weight, scales, group_size, factor.order, factor.upper, settings.block_size)
    errors = row_errors(weight, solved, scales, group_size, hessian)
    if settings.sweeps:
        swept = refine_codes(
            weight, solved, scales, group_size, damped_hessian(hessian, damping),
            sweeps=settings.sweeps, block_size=settings.block_size,
        )  # fmt: skip
        swept_errors = row_errors(weight, swept, scales, group_size, hessian)
        solved = torch.where((swept_errors < errors)[:, None], swept, solved)
        errors = torch.minimum(swept_errors, errors)
    # Both are greedy and damped: now and then they lose.
    nearest = rounded < errors
    codes = torch.where(nearest[:, None], codes, solved)
    error = error_share(torch.where(nearest, rounded, errors), total)
    return GptqResult(codes, damping, None, int(nearest.sum()), error)


def factorize(hessian: Tensor, settings: GptqSettings) -> HessianFactor | None:
    """Order the columns and factorise the inverse of the damped Hessian; None if no damping makes it definite.

    Args:
        hessian: float32 or float64 [in, in].
    """
    diagonal = hessian.diagonal()
    order = torch.arange(len(diagonal), device=hessian.device)
    if settings.act_order:
        order = torch.argsort(diagonal, descending=True, stable=True)
    # H = RRᵀ with R upper triangular is Cholesky's factorisation from the last column to the first, and U = R⁻¹: one
    # factorisation and one triangular inverse, never the square of the condition that inverting H would bring.
    backwards = order.flip(0)
    damping = settings.damping
    while True:
        # These matrices are gigabytes: at most two of FP64 live at a time.
        damped = hessian[backwards[:, None], backwards].double()
        damped.diagonal().add_(_damping_shift(diagonal, damping)[backwards])
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped
        if not bool(failed):
            invert_lower(lower)
            upper = lower.to(torch.float32)
            # A GPU's factor lies by columns: turning it over and laying it by rows are two copies.
            del lower
            return HessianFactor(order, upper.flip(0, 1).contiguous(), damping)
        del lower
        if damping >= MOST_DAMPING:
            break
        damping = min(MOST_DAMPING, max(damping, 1e-4) * DAMPING_STEP)
    return None


def damped_hessian(hessian: Tensor, damping: float) -> Tensor:
    """H + λI in FP32, λ a share of the mean of the diagonal of the columns that were ever active."""
    damped = hessian.to(torch.float32, copy=True)
    damped.diagonal().add_(_damping_shift(hessian.diagonal(), damping))
    return damped


def _damping_shift(diagonal: Tensor, damping: float) -> Tensor:
    """FP64 [in], what is added to the diagonal: λ, and for a column that was never active the others' mean as well."""
    diagonal = diagonal.double()
    active = diagonal != 0
    mean = diagonal[active].mean() if bool(active.any()) else diagonal.new_ones(())
    return torch.where(active, damping * mean, (1 + damping) * mean)


def indefinite() -> str:
    """Why a matrix was rounded to nearest."""
    return f"the Hessian is not positive definite, even with damping {MOST_DAMPING:g}"


def error_chunk(device: torch.device) -> int:
    """Numbers of a matrix, and of the Hessian, whose errors are summed at once."""
    return _ERROR_CHUNK[device.type]


def row_errors(weight: Tensor, codes: Tensor | None, scales: Tensor, group_size: int, hessian: Tensor) -> Tensor:
    """FP64 [out], (w - ŵ) H (w - ŵ)ᵀ of each row, or w H wᵀ without codes."""
    chunk = error_chunk(weight.device)
    rows, columns = weight.shape
    errors = torch.zeros(rows, dtype=torch.float64, device=weight.device)
    # The Hessian in FP64 a panel at a time: as a whole it would be the largest matrix of all.
    width = height = max(1, chunk // columns)
    for left in range(0, columns, width):
        panel = hessian[:, left : left + width].double()
        for first in range(0, rows, height):
            part = slice(first, first + height)
            lost = weight[part].double()
            if codes is not None:
                lost -= dequantize_int4(codes[part], scales[part])
            errors[part] += ((lost @ panel) * lost[:, left : left + width]).sum(dim=1)
    return errors


def error_share(errors: Tensor, total: Tensor) -> float:
    """Σ errors / total, 0 where there was nothing to lose."""
    return (errors.sum() / total).item() if total > 0 else 0.0
