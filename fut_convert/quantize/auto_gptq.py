"""The GPTQ solver of the package auto-gptq 0.7.1, as it is: for artifacts that must carry its codes.

The package's own `__init__` needs libraries of its time, but its solver is two files that need only PyTorch and one
class of transformers; those are loaded as a package of their own, and `auto_gptq` itself is never imported. What it
does differently from `gptq.py`: it chooses the scales itself, 2·max/15 of each group's weights as they are (half of
that, which clips, where no weight is negative); it sets weights that calibration never saw active to zero; and no row
is rounded to nearest where that would be better. Its scales are FP32 while it chooses codes, and are rounded to their
storage type afterwards.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fut_convert.errors import ConvertError
from fut_convert.quantize.finite import require_finite
from fut_convert.quantize.gptq import (
    DAMPING_STEP,
    MOST_DAMPING,
    GptqResult,
    GptqSettings,
    error_share,
    indefinite,
    row_errors,
)
from fut_convert.quantize.rtn import CODE_OFFSET, HIGHEST, LOWEST, rtn_int4
from fut_convert.quantize.scales import require_scale_range

VERSION = "0.7.1"
#: What installs it; without a wheel for the Python in use pip builds it, and must not look for a CUDA compiler.
INSTALL = "BUILD_CUDA_EXT=0 pip install 'futransformer[auto-gptq]'"
#: Name under which the solver's two modules are loaded.
_PACKAGE = "fut_convert.quantize._auto_gptq_solver"


class MissingSolverError(ConvertError):
    """The package auto-gptq is not installed, or not in the version whose solver this is."""


def auto_gptq_problem() -> str | None:
    """Why the solver cannot be used here, with what to do about it; None where it can."""
    remedy = f"install the extra auto-gptq ({INSTALL}), or choose --solver fut"
    try:
        version = metadata.version("auto-gptq")
    except metadata.PackageNotFoundError:
        return f"gptq.solver auto-gptq needs the package auto-gptq {VERSION}, which is not installed: {remedy}"
    if version != VERSION:
        return f"gptq.solver auto-gptq needs the package auto-gptq {VERSION}, found {version}: {remedy}"
    if find_spec("transformers") is None:
        return f"gptq.solver auto-gptq needs transformers, which is not installed: {remedy}"
    return None


def auto_gptq_int4(
    weight: Tensor,
    hessian: Tensor,
    group_size: int,
    settings: GptqSettings | None = None,
    *,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, GptqResult]:
    """Scales and codes of auto-gptq's solver: symmetric, 4 bits, static groups.

    Damping is raised tenfold, up to the mean of the diagonal, while its factorisation fails; if it never succeeds the
    matrix is rounded to nearest with the same scales.

    Args:
        weight: float32 [out, in], `in` a multiple of `group_size`.
        hessian: float32 or float64 [in, in], the sum or mean of xxᵀ over the inputs of the product.
        group_size: neighbouring weights of a row that share a scale.
        settings: damping, order of the columns and block size, as `fasterquant` takes them.
        scale_dtype: storage type of the scales.

    Returns:
        Scales [out, in / group_size] in `scale_dtype`, and the codes with how they came about; the error is that of
        the scales as stored.

    Raises:
        MissingSolverError: see `auto_gptq_problem`.
        NonFiniteWeightError: a weight is NaN or infinite.
        ScaleRangeError: a scale overflows `scale_dtype`.
    """
    settings = settings or GptqSettings()
    require_finite(weight, weight.abs().amax(dim=1))
    damping: float | None = settings.damping
    while damping is not None:
        try:
            decoded, steps = solve(weight, hessian, group_size, settings, damping)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            raised = min(MOST_DAMPING, max(damping, 1e-4) * DAMPING_STEP)
            damping = raised if damping < MOST_DAMPING else None
            continue
        levels = (decoded.unflatten(1, (-1, group_size)) / steps[..., None]).round_().clamp_(LOWEST, HIGHEST)
        codes = levels.add_(CODE_OFFSET).to(torch.uint8).flatten(1)
        scales = require_scale_range(steps.to(scale_dtype), weight)
        return scales, _result(weight, codes, scales, group_size, hessian, damping)
    steps = weight.unflatten(1, (-1, group_size)).abs().amax(dim=-1) / 7.5
    scales = require_scale_range(steps.to(scale_dtype), weight)
    codes = rtn_int4(weight, scales, group_size)
    return scales, _result(weight, codes, scales, group_size, hessian, None)


def solve(
    weight: Tensor, hessian: Tensor, group_size: int, settings: GptqSettings, damping: float
) -> tuple[Tensor, Tensor]:
    """Run `fasterquant` once: FP32 dequantized weights [out, in] and scales [out, in / group_size].

    Raises:
        torch.linalg.LinAlgError: the damped Hessian is not positive definite.
    """
    rows, columns = weight.shape
    # A layer made without storage, so that nothing is drawn at random first.
    layer = torch.nn.Linear(columns, rows, bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight.to(torch.float32), requires_grad=False)
    solver = load_solver()(layer)
    solver.quantizer.configure(4, perchannel=True, sym=True, mse=False)
    # It divides by the mean of the diagonal only, so the Hessian's scale does not matter; it overwrites it.
    solver.H = hessian.to(torch.float32, copy=True)
    solver.nsamples = 1
    scales, _, _ = solver.fasterquant(
        blocksize=settings.block_size,
        percdamp=damping,
        group_size=group_size,
        actorder=settings.act_order,
        static_groups=True,
    )
    return layer.weight.data, scales.to(torch.float32)


@cache
def load_solver() -> Any:
    """The class `GPTQ` of auto-gptq, without importing the package.

    Raises:
        MissingSolverError: see `auto_gptq_problem`.
    """
    problem = auto_gptq_problem()
    if problem is not None:
        raise MissingSolverError(problem)
    spec = find_spec("auto_gptq")
    if spec is None or not spec.submodule_search_locations:
        raise MissingSolverError(f"auto-gptq {VERSION} is installed without its modules; install it again: {INSTALL}")
    package = ModuleType(_PACKAGE)
    package.__path__ = [str(Path(place) / "quantization") for place in spec.submodule_search_locations]
    sys.modules[_PACKAGE] = package
    solver = import_module(f"{_PACKAGE}.gptq")
    if not torch.cuda.is_available():
        # It waits for the card in order to print how long it took.
        solver.torch = _WithoutCuda()  # type: ignore[attr-defined]
    return solver.GPTQ


class _WithoutCuda:
    """`torch` to the solver's module alone, with a CUDA that has nothing to wait for."""

    cuda = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _result(
    weight: Tensor, codes: Tensor, scales: Tensor, group_size: int, hessian: Tensor, damping: float | None
) -> GptqResult:
    hessian = hessian.double()
    total = row_errors(weight, None, scales, group_size, hessian).sum()
    error = error_share(row_errors(weight, codes, scales, group_size, hessian), total)
    if damping is None:
        return GptqResult(codes, None, indefinite(), len(weight), error)
    return GptqResult(codes, damping, None, 0, error)
