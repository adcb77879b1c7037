"""GPTQ against a slow twin in FP64, and against rounding to nearest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fut_convert.quantize.gptq import GptqSettings, gptq_int4
from fut_convert.quantize.refine import refine_codes
from fut_convert.quantize.rtn import rtn_int4
from fut_convert.quantize.scales import int4_scales
from gptq_matrices import correlated_hessian, random_weight, relative_error, shifted

GROUP = 32


def weighted_scales(weight: Tensor, hessian: Tensor) -> Tensor:
    return int4_scales(weight, GROUP, "weighted_search", second_moment=hessian.diagonal())


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
    found = gptq_int4(weight, hessian, scales, GROUP, GptqSettings(0.01, act_order, block_size, sweeps=0))
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


def naive_descent(weight: Tensor, codes: Tensor, scales: Tensor, hessian: Tensor) -> Tensor:
    """One pass in FP64 that tries every code of every weight and keeps the one of least error."""
    codes, steps = codes.clone(), scales.double()
    for row in range(len(weight)):
        for column in range(weight.shape[1]):
            losses = []
            for code in range(16):
                codes[row, column] = code
                decoded = (codes[row].double() - 8) * steps[row].repeat_interleave(GROUP)
                lost = decoded - weight[row].double()
                losses.append(float(lost @ hessian @ lost))
            codes[row, column] = losses.index(min(losses))
    return codes


@pytest.mark.parametrize("block_size", [1, 24, 128])
def test_a_sweep_takes_the_best_code_of_each_column_in_turn(block_size: int) -> None:
    hessian = correlated_hessian(64, seed=20)
    weight = random_weight(4, 64, seed=21)
    scales = weighted_scales(weight, hessian)
    scales[1] *= -1
    start = rtn_int4(weight, scales, GROUP)
    found = refine_codes(weight, start, scales, GROUP, hessian.float(), sweeps=1, block_size=block_size)
    assert torch.equal(found, naive_descent(weight, start, scales, hessian))
    assert not torch.equal(found, start)


def test_more_sweeps_lose_less_and_none_loses_more_than_gptq() -> None:
    hessian = correlated_hessian(128, seed=22, spread=1.5)
    weight = random_weight(32, 128, seed=23)
    scales = weighted_scales(weight, hessian)
    errors = [
        gptq_int4(weight, hessian, scales, GROUP, GptqSettings(sweeps=sweeps)).weighted_error for sweeps in (0, 1, 4)
    ]
    assert errors[2] < errors[1] < errors[0]


def test_a_group_of_scale_zero_stays_zero_in_a_sweep() -> None:
    hessian = correlated_hessian(64, seed=24)
    weight = random_weight(8, 64, seed=25)
    weight[:, :GROUP] = 0
    scales = weighted_scales(weight, hessian)
    start = rtn_int4(weight, scales, GROUP)
    found = refine_codes(weight, start, scales, GROUP, hessian.float(), sweeps=2, block_size=128)
    assert (found[:, :GROUP] == 8).all() and bool(found.max() <= 15)
