"""INT4 and E4M3 codes against slow definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fut_convert.quantize.finite import NonFiniteWeightError
from fut_convert.quantize.fold import fold_gain
from fut_convert.quantize.fp8 import E4M3_MAX, quantize_e4m3
from fut_convert.quantize.rtn import rtn_int4


def e4m3_values() -> np.ndarray:
    """All non-negative finite values of E4M3, from its definition: bias 7, three mantissa bits, no infinity."""
    subnormal = [m / 8 * 2.0**-6 for m in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    return np.array(subnormal + normal)


def nearest_e4m3(x: float) -> float:
    """Nearest E4M3 value, ties to the even code, saturating."""
    values = e4m3_values()
    distance = np.abs(values - min(abs(x), E4M3_MAX))
    nearest = np.flatnonzero(distance == distance.min())
    code = next(c for c in nearest if len(nearest) == 1 or c % 2 == 0)
    return math.copysign(values[code], x)


@pytest.mark.parametrize("exponent", [-12, 0, 100])
def test_e4m3_rounds_to_nearest_even(exponent: int) -> None:
    values = e4m3_values()
    middles = (values[1:] + values[:-1]) / 2
    points = np.concatenate([values, middles, middles * (1 + 2.0**-20), middles * (1 - 2.0**-20), [2.0**-30]])
    # Largest value 448 · 2ᵉ, so that the row's scale is 2ᵉ exactly.
    row = torch.tensor(np.concatenate([points, -points]) * 2.0**exponent, dtype=torch.float32)[None]
    codes, scale = quantize_e4m3(row)
    assert scale.item() == 2.0**exponent
    expected = [nearest_e4m3(float(v)) for v in row[0].double() / 2.0**exponent]
    assert codes.float()[0].tolist() == expected


@given(st.integers(0, 2**31), st.floats(-38, 30))
def test_e4m3_is_within_half_a_step_at_any_magnitude(seed: int, magnitude: float) -> None:
    weight = torch.randn(4, 24, generator=torch.Generator().manual_seed(seed)) * 10.0**magnitude
    codes, scale = quantize_e4m3(weight)
    assert torch.isfinite(codes.float()).all()
    restored = codes.float() * scale[:, None]
    step = torch.maximum(weight.abs() * 2**-4, scale[:, None] * 2**-10)
    tiny = scale[:, None] == 0
    assert ((restored - weight).abs() <= torch.where(tiny, 1e-35, step * (1 + 1e-5))).all()


def test_e4m3_rows_of_zeros_are_safe() -> None:
    weight = torch.zeros(2, 16)
    weight[1, 0] = -2.0
    codes, scale = quantize_e4m3(weight)
    assert scale.tolist() == [0, torch.tensor(2.0 / E4M3_MAX).item()]
    assert codes.float()[0].tolist() == [0] * 16 and codes.float()[1, 0] == -E4M3_MAX


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_e4m3_locates_values_that_are_not_finite(value: float) -> None:
    weight = torch.ones(3, 16)
    weight[1, 4] = value
    with pytest.raises(NonFiniteWeightError, match="row 1, column 4"):
        quantize_e4m3(weight)


def test_int4_rounds_ties_to_even_and_saturates() -> None:
    weight = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 7.4, 7.6, 99, -8.4, -8.6, -99, 0, 3, -3, 1e30, -1e30]])
    codes = rtn_int4(weight.repeat(1, 2), torch.ones(1, 1, dtype=torch.bfloat16), 32)
    levels = [0, 2, 2, 0, -2, 7, 7, 7, -8, -8, -8, 0, 3, -3, 7, -8]
    assert codes.dtype == torch.uint8
    assert (codes.int() - 8).tolist() == [levels * 2]


def test_int4_uses_each_groups_scale_whatever_its_sign() -> None:
    weight = torch.ones(2, 64)
    scales = torch.tensor([[1.0, -1.0], [0.25, 0.0]], dtype=torch.float16)
    codes = rtn_int4(weight, scales, 32).int() - 8
    assert codes.unflatten(1, (2, 32))[..., 0].tolist() == [[1, -1], [4, 0]]


def test_folding_a_gain_is_exact_in_fp32() -> None:
    weight, gain = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16), torch.tensor([0.1, 3.0])
    folded = fold_gain(weight, gain)
    assert folded.dtype == torch.float32
    assert torch.equal(folded, torch.tensor([[1.5 * gain[0], -6.0]]))
