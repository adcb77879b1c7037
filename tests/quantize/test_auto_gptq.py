"""auto-gptq's solver: that it runs as it is, and as an independent oracle of ours."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fut_convert.quantize import auto_gptq
from fut_convert.quantize.auto_gptq import MissingSolverError, auto_gptq_int4, auto_gptq_problem, load_solver, solve
from fut_convert.quantize.finite import NonFiniteWeightError
from fut_convert.quantize.gptq import GptqSettings, gptq_int4
from fut_convert.quantize.rtn import rtn_int4
from fut_convert.quantize.scales import ScaleRangeError
from fut_runtime.artifact.fragment import dequantize_int4
from gptq_matrices import correlated_hessian, random_weight, relative_error, shifted

GROUP = 64
needs_solver = pytest.mark.skipif(auto_gptq_problem() is not None, reason=str(auto_gptq_problem()))


def naive_auto_gptq(weight: Tensor, hessian: Tensor, damping: float, act_order: bool) -> tuple[Tensor, Tensor]:
    """Its algorithm in FP64, written from its description: codes [out, in] and scales [out, in / GROUP]."""
    groups = weight.double().unflatten(1, (-1, GROUP))
    has_negative = (groups < 0).any(dim=-1)
    largest = groups.abs().amax(dim=-1)
    scales = torch.where(has_negative, 2 * largest / 15, largest / 15)
    scales = torch.where(largest == 0, 2 / 15, scales)
    columns = weight.shape[1]
    left = list(range(columns))
    if act_order:
        left = torch.argsort(hessian.diagonal(), descending=True).tolist()
    damped = hessian + damping * hessian.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    rest, codes = weight.double().clone(), torch.zeros(weight.shape, dtype=torch.uint8)
    while left:
        inverse = torch.linalg.inv(damped[left][:, left])
        column = left[0]
        step = scales[:, column // GROUP]
        code = ((rest[:, column] / step).round() + 8).clamp(0, 15)
        codes[:, column] = code.to(torch.uint8)
        rest[:, left] -= ((rest[:, column] - (code - 8) * step) / inverse[0, 0])[:, None] * inverse[0]
        left = left[1:]
    return codes, scales


@pytest.fixture
def without_cached_solver() -> Iterator[None]:
    load_solver.cache_clear()
    yield
    load_solver.cache_clear()


@needs_solver
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
def test_codes_are_those_of_its_algorithm(act_order: bool, scale_dtype: torch.dtype) -> None:
    hessian = correlated_hessian(128, seed=1)
    weight = random_weight(24, 128, seed=2)
    weight[3, :GROUP] = weight[3, :GROUP].abs()  # a group without a negative weight: its scale clips
    weight[4, GROUP:] = 0
    settings = GptqSettings(damping=0.02, act_order=act_order)
    scales, found = auto_gptq_int4(weight, hessian, GROUP, settings, scale_dtype=scale_dtype)
    codes, expected_scales = naive_auto_gptq(weight, hessian, 0.02, act_order)
    # A weight that FP32 puts on the other side of a tie changes the row after it.
    assert int((found.codes != codes).any(dim=1).sum()) <= 1
    assert torch.equal(scales, expected_scales.to(torch.float32).to(scale_dtype))
    assert found.damping == 0.02 and found.fallback is None and found.nearest_rows == 0
    assert found.weighted_error == pytest.approx(relative_error(weight, found.codes, scales, hessian), rel=1e-9)


@needs_solver
@pytest.mark.parametrize("seed", range(3))
def test_ours_is_never_worse_at_equal_settings(seed: int) -> None:
    hessian = correlated_hessian(256, seed, spread=1.0)
    weight = random_weight(96, 256, seed + 50)
    decoded, steps = solve(weight, hessian, GROUP, GptqSettings(), 0.01)
    scales = weight.unflatten(1, (-1, GROUP)).abs().amax(dim=-1) / 7.5
    assert torch.allclose(steps, scales, rtol=1e-6)
    ours = gptq_int4(weight, hessian, scales, GROUP)
    lost = weight.double() - decoded.double()
    error = float((lost @ hessian @ lost.T).trace() / (weight.double() @ hessian @ weight.double().T).trace())
    assert ours.weighted_error <= error


@needs_solver
def test_padding_and_dead_columns_become_zero() -> None:
    hessian = correlated_hessian(GROUP, seed=6)
    weight = torch.cat([random_weight(8, GROUP, seed=7), torch.zeros(8, 20), random_weight(8, 44, seed=8)], dim=1)
    wide = torch.block_diag(hessian, torch.zeros(GROUP, GROUP, dtype=torch.float64))
    scales, found = auto_gptq_int4(weight, wide, GROUP)
    assert (dequantize_int4(found.codes, scales)[:, GROUP:] == 0).all()


@needs_solver
def test_damping_escalates_and_then_gives_way_to_rounding() -> None:
    weight = random_weight(8, 128, seed=13)
    _, raised = auto_gptq_int4(weight, shifted(correlated_hessian(128, seed=12), 0.05), GROUP)
    assert raised.damping == 0.1 and raised.fallback is None
    scales, fallen = auto_gptq_int4(weight, shifted(correlated_hessian(128, seed=12), 2.0), GROUP)
    assert fallen.damping is None and fallen.fallback is not None and "not positive definite" in fallen.fallback
    assert fallen.nearest_rows == 8 and torch.equal(fallen.codes, rtn_int4(weight, scales, GROUP))


@needs_solver
def test_the_package_itself_is_neither_imported_nor_shadowed() -> None:
    load_solver()
    assert "auto_gptq" not in sys.modules and "peft" not in sys.modules


@needs_solver
def test_the_hessian_and_the_weight_stay_as_they_are() -> None:
    hessian, weight = correlated_hessian(64, seed=1).float(), random_weight(4, 64, seed=2)
    before = hessian.clone(), weight.clone()
    auto_gptq_int4(weight, hessian, GROUP)
    assert torch.equal(hessian, before[0]) and torch.equal(weight, before[1])


@needs_solver
def test_weights_and_scales_that_cannot_be_stored_are_refused() -> None:
    hessian, weight = correlated_hessian(64, seed=1), random_weight(4, 64, seed=2)
    with pytest.raises(ScaleRangeError, match="choose scale_dtype bfloat16"):
        auto_gptq_int4(weight * 1e7, hessian, GROUP, scale_dtype=torch.float16)
    weight[2, 5] = torch.nan
    with pytest.raises(NonFiniteWeightError, match="row 2, column 5"):
        auto_gptq_int4(weight, hessian, GROUP)


@pytest.mark.usefixtures("without_cached_solver")
def test_its_absence_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(auto_gptq.metadata, "version", absent)
    with pytest.raises(MissingSolverError, match=r"not installed: install the extra auto-gptq .*futransformer\[auto"):
        load_solver()


@pytest.mark.usefixtures("without_cached_solver")
def test_another_version_and_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_gptq.metadata, "version", lambda _: "0.6.0")
    assert "0.7.1, found 0.6.0" in str(auto_gptq_problem())
    monkeypatch.setattr(auto_gptq.metadata, "version", lambda _: "0.7.1")
    monkeypatch.setattr(auto_gptq, "find_spec", lambda _: None)
    assert "needs transformers" in str(auto_gptq_problem())
    monkeypatch.setattr(auto_gptq, "find_spec", lambda n: ModuleType(n).__spec__ if n == "auto_gptq" else object())
    with pytest.raises(MissingSolverError, match="without its modules"):
        load_solver()
