"""INT4 scales: what each method promises, against exhaustive search and on awkward weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fut_convert.quantize.finite import NonFiniteWeightError
from fut_convert.quantize.rtn import rtn_int4
from fut_convert.quantize.scales import SCALE_METHODS, ScaleRangeError, int4_scales

GROUP = 32


def dequantized(weight: Tensor, scales: Tensor) -> Tensor:
    codes = rtn_int4(weight, scales, GROUP).unflatten(1, (-1, GROUP)).double() - 8
    return (codes * scales.double()[..., None]).flatten(1)


def error(weight: Tensor, scales: Tensor, importance: Tensor | None = None) -> Tensor:
    """What the search minimises in each group, in FP64: weighted squares, or Σ |error|^2.4 without weights."""
    difference = (dequantized(weight, scales) - weight.double()).abs()
    terms = difference.pow(2.4) if importance is None else difference.square() * importance.double()
    return terms.unflatten(1, (-1, GROUP)).sum(dim=-1)


def scales_of(weight: Tensor, method: str, moment: Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return int4_scales(weight, GROUP, method, second_moment=moment, scale_dtype=dtype)


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Weights and second moments over many orders of magnitude, with zero groups, spikes and one-sided groups."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows, groups = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    weight = torch.randn(rows, groups * GROUP, generator=generator) * 10.0 ** draw(st.integers(-20, 15))
    kind = draw(st.sampled_from(["plain", "positive", "spike", "lattice", "zeros"]))
    if kind == "positive":
        weight = weight.abs()
    elif kind == "spike":
        weight[:, 3] *= 50
    elif kind == "lattice":
        weight = (weight / weight.abs().amax() * 3).round()
    elif kind == "zeros":
        weight[:, :GROUP] = 0
    moment = torch.randn(groups * GROUP, generator=generator).exp() ** draw(st.sampled_from([0, 1, 4]))
    moment[draw(st.integers(0, groups * GROUP - 1))] = 0
    return weight, moment


@given(matrices())
def test_search_never_loses_to_the_absolute_maximum(case: tuple[Tensor, Tensor]) -> None:
    weight, moment = case
    for method, importance in (("search", None), ("weighted_search", moment)):
        searched = error(weight, scales_of(weight, method, moment), importance)
        absmax = error(weight, scales_of(weight, "absmax_7"), importance)
        # The search compares FP32 sums.
        assert (searched <= absmax * (1 + 1e-5)).all()


def every_scale(lowest: float, highest: float, dtype: torch.dtype) -> list[Tensor]:
    """Every value of a 16-bit type between two positive numbers, and their negatives."""
    first, last = (int(torch.tensor(x).to(dtype).view(torch.int16)) for x in (lowest, highest))
    positive = torch.arange(first, last + 1, dtype=torch.int16).view(dtype)
    return list(torch.cat((positive, -positive)))


@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0])
def test_search_finds_what_trying_every_scale_finds(spread: float) -> None:
    """`spread`: standard deviation of the logarithm of the second moments; 0 stands for the unweighted search."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(120, GROUP, generator=generator)
    moment = (torch.randn(GROUP, generator=generator) * spread).exp()
    method, importance = ("weighted_search", moment) if spread else ("search", None)
    largest = weight.abs().amax(dim=1)
    least = torch.full((120, 1), torch.inf, dtype=torch.float64)
    for scale in every_scale(largest.min().item() / 40, largest.max().item() / 4, torch.bfloat16):
        least = torch.minimum(least, error(weight, scale.expand(120, 1), importance))
    found = error(weight, scales_of(weight, method, moment), importance)
    assert (found >= least * (1 - 1e-9)).all()
    # Where a few channels carry nearly everything the error has narrow valleys, and a group may miss the deepest.
    assert found.sum() <= 1.002 * least.sum()
    assert (found <= 1.2 * least).all()


def test_weighting_moves_the_error_to_where_nothing_flows() -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(64, 2 * GROUP, generator=generator)
    moment = torch.where(torch.arange(2 * GROUP) % 4 == 0, 100.0, 0.01)
    plain = error(weight, scales_of(weight, "search"), moment).sum()
    weighted = error(weight, scales_of(weight, "weighted_search", moment), moment).sum()
    assert weighted < 0.6 * plain


def test_one_sided_groups_use_all_eight_codes_of_their_side() -> None:
    weight = torch.arange(GROUP, dtype=torch.float32).remainder(9)[None]
    scales = scales_of(weight, "search")
    assert scales.item() == -1.0
    assert error(weight, scales).item() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_absolute_maximum_rules_round_to_the_storage_type(dtype: torch.dtype) -> None:
    weight = torch.zeros(1, GROUP)
    weight[0, 7] = -3.0
    assert torch.equal(scales_of(weight, "absmax_7", dtype=dtype), torch.tensor([[3 / 7]]).to(dtype))
    assert torch.equal(scales_of(weight, "absmax_7.5", dtype=dtype), torch.tensor([[3 / 7.5]]).to(dtype))


@pytest.mark.parametrize("method", SCALE_METHODS)
def test_zero_groups_have_scale_zero_and_zero_codes(method: str) -> None:
    weight = torch.zeros(2, 2 * GROUP)
    weight[1, GROUP:] = 0.5
    scales = scales_of(weight, method, torch.ones(2 * GROUP))
    assert scales[0].tolist() == [0, 0] and scales[1, 0] == 0
    assert (rtn_int4(weight, scales, GROUP)[0] == 8).all()
    # absmax/7.5 clips the largest weight to 7/7.5 of itself.
    assert torch.allclose(dequantized(weight, scales).float(), weight, rtol=0.07)


def test_a_group_never_active_in_calibration_counts_its_columns_alike() -> None:
    weight = torch.randn(8, GROUP, generator=torch.Generator().manual_seed(1))
    silent, alike = (scales_of(weight, "weighted_search", m) for m in (torch.zeros(GROUP), torch.ones(GROUP)))
    assert torch.equal(silent, alike)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(20, 2 * GROUP, generator=torch.Generator().manual_seed(1))
    whole = scales_of(weight, "search")
    monkeypatch.setattr("fut_convert.quantize.scales._CHUNK_CPU", 6 * GROUP)
    assert torch.equal(scales_of(weight, "search"), whole)


@pytest.mark.parametrize("method", SCALE_METHODS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_located(method: str, value: float) -> None:
    weight = torch.ones(3, GROUP)
    weight[2, 5] = value
    with pytest.raises(NonFiniteWeightError, match=r"1 values .* in 1 rows, the first at row 2, column 5"):
        scales_of(weight, method, torch.ones(GROUP))


def test_a_scale_beyond_its_storage_type_is_refused() -> None:
    weight = torch.full((1, GROUP), 1e6)
    with pytest.raises(ScaleRangeError, match="bfloat16"):
        scales_of(weight, "absmax_7", dtype=torch.float16)


@pytest.mark.parametrize("moment", [None, torch.ones(GROUP - 1), -torch.ones(GROUP), torch.full((GROUP,), torch.nan)])
def test_bad_second_moments_are_refused(moment: Tensor | None) -> None:
    with pytest.raises(ValueError, match="second moment"):
        scales_of(torch.ones(1, GROUP), "weighted_search", moment)


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(ValueError, match="absmax_7"):
        scales_of(torch.ones(1, GROUP), "absmax")
