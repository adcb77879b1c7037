"""GPTQ against a slow twin in FP64, against rounding to nearest, and against another implementation."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fut_convert.quantize.gptq import GptqSettings, gptq_int4
from fut_convert.quantize.rtn import rtn_int4
from fut_convert.quantize.scales import int4_scales
from fut_runtime.artifact.fragment import dequantize_int4

GROUP = 32


def correlated_hessian(columns: int, seed: int, *, spread: float = 1.0, samples: int = 0) -> Tensor:
    """FP64 mean of xxᵀ over correlated inputs whose channels differ in size."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator, dtype=torch.float64) / columns**0.5
    mixing += torch.eye(columns)
    x = torch.randn(samples or 8 * columns, columns, generator=generator, dtype=torch.float64) @ mixing
    x *= (spread * torch.randn(columns, generator=generator, dtype=torch.float64)).exp()
    return x.T @ x / len(x)


def random_weight(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def weighted_scales(weight: Tensor, hessian: Tensor) -> Tensor:
    return int4_scales(weight, GROUP, "weighted_search", second_moment=hessian.diagonal())


def relative_error(weight: Tensor, codes: Tensor, scales: Tensor, hessian: Tensor) -> float:
    """tr((W - Ŵ) H (W - Ŵ)ᵀ) / tr(W H Wᵀ), written as it stands."""
    lost = weight.double() - dequantize_int4(codes, scales).double()
    return float((lost @ hessian @ lost.T).trace() / (weight.double() @ hessian @ weight.double().T).trace())


def naive_gptq(weight: Tensor, hessian: Tensor, scales: Tensor, damping: float, act_order: bool) -> Tensor:
    """Optimal brain quantization in a fixed order, as its derivation has it: after each column the inverse of what is
    left of the Hessian is computed anew, and the best change of the columns that are left is taken.
    """
    columns = weight.shape[1]
    left = list(range(columns))
    if act_order:
        left = torch.argsort(hessian.diagonal(), descending=True, stable=True).tolist()
    damped = hessian + damping * hessian.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    rest = weight.double().clone()
    codes = torch.zeros(weight.shape, dtype=torch.uint8)
    while left:
        inverse = torch.linalg.inv(damped[left][:, left])
        column = left[0]
        step = scales[:, column // GROUP].double()
        level = (rest[:, column] / step).round().clamp(-8, 7)
        codes[:, column] = (level + 8).to(torch.uint8)
        error = (rest[:, column] - level * step) / inverse[0, 0]
        rest[:, left] -= error[:, None] * inverse[0]
        left = left[1:]
    return codes


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("block_size", [1, 24, 64, 128])
def test_codes_equal_those_of_the_derivation(act_order: bool, block_size: int) -> None:
    hessian = correlated_hessian(64, seed=1)
    weight = random_weight(40, 64, seed=2)
    scales = weighted_scales(weight, hessian)
    found = gptq_int4(weight, hessian, scales, GROUP, GptqSettings(0.01, act_order, block_size))
    expected = naive_gptq(weight, hessian, scales, 0.01, act_order)
    # A weight that FP32 puts on the other side of a tie changes the row after it.
    differing = int((found.codes != expected).any(dim=1).sum()) - found.nearest_rows
    assert differing <= 1
    assert found.damping == 0.01 and found.fallback is None
    assert found.weighted_error == pytest.approx(relative_error(weight, found.codes, scales, hessian), rel=1e-9)


def test_uncorrelated_inputs_are_rounded_to_nearest() -> None:
    weight = random_weight(16, 96, seed=3)
    hessian = torch.linspace(0.5, 20, 96).diag()
    scales = weighted_scales(weight, hessian)
    assert torch.equal(gptq_int4(weight, hessian, scales, GROUP).codes, rtn_int4(weight, scales, GROUP))


@given(st.integers(0, 2**31), st.sampled_from([0.0, 1.0, 3.0]), st.sampled_from(["weighted", "absmax_7", "negative"]))
def test_no_row_is_worse_than_rounded_to_nearest(seed: int, spread: float, kind: str) -> None:
    hessian = correlated_hessian(96, seed, spread=spread, samples=50)
    weight = random_weight(6, 96, seed + 1)
    scales = weighted_scales(weight, hessian) if kind == "weighted" else int4_scales(weight, GROUP, "absmax_7")
    scales = -scales if kind == "negative" else scales
    result = gptq_int4(weight, hessian, scales, GROUP)
    nearest = rtn_int4(weight, scales, GROUP)
    for row in range(len(weight)):
        one = slice(row, row + 1)
        ours, theirs = (relative_error(weight[one], c[one], scales[one], hessian) for c in (result.codes, nearest))
        assert ours <= theirs * (1 + 1e-6)


def test_correlated_inputs_gain_a_lot() -> None:
    hessian = correlated_hessian(256, seed=4)
    weight = random_weight(64, 256, seed=5)
    scales = weighted_scales(weight, hessian)
    result = gptq_int4(weight, hessian, scales, GROUP)
    assert result.nearest_rows == 0
    assert result.weighted_error < 0.6 * relative_error(weight, rtn_int4(weight, scales, GROUP), scales, hessian)


def test_act_order_helps_where_channels_differ() -> None:
    errors: dict[bool, float] = {True: 0.0, False: 0.0}
    for seed in range(5):
        hessian = correlated_hessian(128, seed, spread=1.5)
        weight = random_weight(64, 128, seed + 100)
        scales = weighted_scales(weight, hessian)
        for act_order in errors:
            errors[act_order] += gptq_int4(
                weight, hessian, scales, GROUP, GptqSettings(act_order=act_order)
            ).weighted_error
    assert errors[True] < errors[False]


def test_padding_and_dead_columns_change_nothing_else() -> None:
    hessian = correlated_hessian(GROUP, seed=6)
    weight = random_weight(8, GROUP, seed=7)
    scales = weighted_scales(weight, hessian)
    alone = gptq_int4(weight, hessian, scales, GROUP)
    # 20 columns of padding, and 12 with weights that no input ever reached.
    dead = torch.cat([torch.zeros(8, 20), random_weight(8, 12, seed=8)], dim=1)
    wide = torch.block_diag(hessian, torch.zeros(GROUP, GROUP, dtype=torch.float64))
    more = torch.cat([scales, int4_scales(dead, GROUP, "absmax_7")], dim=1)
    found = gptq_int4(torch.cat([weight, dead], dim=1), wide, more, GROUP)
    assert torch.equal(found.codes[:, :GROUP], alone.codes)
    assert torch.equal(found.codes[:, GROUP:], rtn_int4(dead, more[:, 1:], GROUP))
    assert (found.codes[:, GROUP : GROUP + 20] == 8).all()
    assert found.weighted_error == pytest.approx(alone.weighted_error)


def test_a_group_with_scale_zero_hands_its_error_on() -> None:
    hessian = correlated_hessian(64, seed=9)
    weight = random_weight(8, 64, seed=10)
    weight[:, :GROUP] = 0
    result = gptq_int4(weight, hessian, weighted_scales(weight, hessian), GROUP)
    assert (result.codes[:, :GROUP] == 8).all() and 0 < result.weighted_error < 0.02


def test_no_calibration_at_all_means_rounding_to_nearest() -> None:
    weight = random_weight(4, 64, seed=11)
    scales = int4_scales(weight, GROUP, "absmax_7")
    result = gptq_int4(weight, torch.zeros(64, 64), scales, GROUP)
    assert torch.equal(result.codes, rtn_int4(weight, scales, GROUP)) and result.weighted_error == 0


def shifted(hessian: Tensor, share: float) -> Tensor:
    """The same with its smallest eigenvalue at -share of the diagonal's mean."""
    values = torch.linalg.eigvalsh(hessian)
    identity = torch.eye(len(hessian), dtype=torch.float64)
    found = hessian - values[0] * identity
    # The shift changes the mean itself: mean' = mean - s, s = share · mean'.
    return found - identity * (share / (1 + share) * found.diagonal().mean())


@pytest.mark.parametrize(("share", "damping"), [(0.0, 0.01), (0.05, 0.1), (0.5, 1.0)])
def test_damping_escalates_until_the_hessian_is_definite(share: float, damping: float) -> None:
    hessian = shifted(correlated_hessian(64, seed=12), share)
    weight = random_weight(8, 64, seed=13)
    scales = int4_scales(weight, GROUP, "absmax_7")
    result = gptq_int4(weight, hessian, scales, GROUP)
    assert result.damping == damping and result.fallback is None


def test_an_indefinite_hessian_falls_back_and_says_so() -> None:
    hessian = shifted(correlated_hessian(64, seed=14), 2.0)
    weight = random_weight(8, 64, seed=15)
    scales = int4_scales(weight, GROUP, "absmax_7")
    result = gptq_int4(weight, hessian, scales, GROUP)
    assert result.damping is None and result.fallback is not None and "not positive definite" in result.fallback
    assert result.nearest_rows == 8
    assert torch.equal(result.codes, rtn_int4(weight, scales, GROUP))


@pytest.mark.parametrize("hessian", [torch.eye(63), torch.full((64, 64), torch.nan), torch.eye(64) * torch.inf])
def test_bad_hessians_are_refused(hessian: Tensor) -> None:
    weight = random_weight(4, 64, seed=16)
    with pytest.raises(ValueError, match="the Hessian"):
        gptq_int4(weight, hessian, int4_scales(weight, GROUP, "absmax_7"), GROUP)


@contextmanager
def auto_gptq() -> Iterator[tuple[Any, Any]]:
    """The solver and the quantizer of auto-gptq, whose package cannot be imported beside current libraries."""
    pytest.importorskip("transformers")
    spec = importlib.util.find_spec("auto_gptq")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("auto-gptq is not installed: pip install --no-deps auto-gptq==0.7.1")
    package = ModuleType("auto_gptq")
    package.__path__ = [str(Path(p)) for p in spec.submodule_search_locations]
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "auto_gptq"}
    parent = ModuleType("auto_gptq.quantization")
    parent.__path__ = [str(Path(p) / "quantization") for p in spec.submodule_search_locations]
    sys.modules |= {"auto_gptq": package, "auto_gptq.quantization": parent}
    try:
        solver = importlib.import_module("auto_gptq.quantization.gptq").GPTQ
        quantizer = importlib.import_module("auto_gptq.quantization.quantizer").Quantizer
        yield solver, quantizer
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "auto_gptq"]:
            del sys.modules[name]
        sys.modules |= before


def solve_with_auto_gptq(weight: Tensor, hessian: Tensor, group: int, synchronize: Callable[[], None]) -> Tensor:
    """Its dequantized weights, at damping 0.01, act-order and static groups."""
    with auto_gptq() as (solver, _):
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight.data = weight.clone()
        theirs = solver(layer)
        theirs.quantizer.configure(4, perchannel=True, sym=True, mse=False)
        theirs.H = hessian.float()
        theirs.nsamples = 1
        theirs.fasterquant(blocksize=64, percdamp=0.01, group_size=group, actorder=True, static_groups=True)
        return layer.weight.data


@pytest.mark.parametrize("seed", range(3))
def test_never_worse_than_auto_gptq_at_equal_settings(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    hessian = correlated_hessian(256, seed, spread=1.0)
    weight = random_weight(96, 256, seed + 50)
    theirs = solve_with_auto_gptq(weight, hessian, 64, torch.cuda.synchronize)
    # Scales in FP32, as there; absmax/7.5 is its 2·max/15.
    scales = weight.unflatten(1, (-1, 64)).abs().amax(dim=-1) / 7.5
    ours = gptq_int4(weight, hessian, scales, 64)
    lost = weight.double() - theirs.double()
    error = float((lost @ hessian @ lost.T).trace() / (weight.double() @ hessian @ weight.double().T).trace())
    assert ours.weighted_error <= error * (1 + 1e-3)
