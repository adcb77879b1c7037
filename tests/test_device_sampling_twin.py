"""The device sampler's fixed-point arithmetic chooses what the host sampler does, short of rounding at a boundary."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from device_sampling_twin import TOP_WEIGHT, DeviceSampling, kept_weights, sample, weights
from fut_runtime.sampling import apply_temperature, draw, keep_min_p, keep_top_k, keep_top_p

Row = npt.NDArray[np.float32]

# Coarse values, so that ties occur; among them values that cannot be drawn.
coarse = st.lists(st.integers(-60, 40), min_size=1, max_size=60).map(lambda v: np.array(v, np.float32) / 4)
fine = st.tuples(st.integers(0, 2**32), st.integers(1, 300), st.floats(0.01, 20)).map(
    lambda a: (np.random.default_rng(a[0]).standard_normal(a[1]) * a[2]).astype(np.float32)
)
rows = st.one_of(coarse, fine)
samplings = st.builds(
    DeviceSampling,
    uniform=st.integers(0, 2**53 - 1).map(lambda n: n / 2**53),
    temperature=st.floats(0.05, 10),
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(1e-6, 1)),
    top_k=st.one_of(st.just(0), st.integers(1, 70)),
).map(DeviceSampling.rounded)

#: What rounding may move: a weight by 2^-46 of the top one, and a sum of them by as much for each.
ROUNDING = 1e-9


def host_filtered(logits: Row, sampling: DeviceSampling) -> torch.Tensor:
    scores = apply_temperature(torch.from_numpy(logits), sampling.temperature)
    return keep_min_p(keep_top_p(keep_top_k(scores, sampling.top_k), sampling.top_p), sampling.min_p)


def near_a_boundary(logits: Row, sampling: DeviceSampling) -> bool:
    """Whether top-p or min-p cut so close to a token that rounding decides."""
    scores = keep_top_k(apply_temperature(torch.from_numpy(logits), sampling.temperature), sampling.top_k)
    ordered = scores.softmax(-1).sort(descending=True).values
    mass = ordered.cumsum(-1)
    close = bool(((mass - sampling.top_p).abs() < ROUNDING).any()) and sampling.top_p < 1
    if sampling.min_p > 0:
        gap = (scores - math.log(sampling.min_p)).abs()
        close |= bool(((gap > 0) & (gap < ROUNDING)).any())
    return close


@given(rows, samplings)
def test_filters_keep_what_the_host_keeps(logits: Row, sampling: DeviceSampling) -> None:
    assume(not near_a_boundary(logits, sampling))
    expected = host_filtered(logits, sampling).softmax(-1).numpy()
    found = kept_weights(logits, sampling)
    assert found[logits.argmax()] == TOP_WEIGHT
    probability = found / found.sum()
    assert np.abs(probability - expected).max() < ROUNDING
    assert ((found > 0) == (expected > 0))[expected > ROUNDING].all()


@given(rows, samplings)
def test_draws_are_the_hosts(logits: Row, sampling: DeviceSampling) -> None:
    assume(not near_a_boundary(logits, sampling))
    filtered = host_filtered(logits, sampling)
    cumulative = filtered.softmax(-1).cumsum(-1)
    assume(bool(((cumulative - sampling.uniform).abs() > ROUNDING).all()))
    assert sample(logits, sampling) == draw(filtered, sampling.uniform)


@given(rows)
def test_greedy_takes_the_first_of_equals(logits: Row) -> None:
    token = sample(logits, DeviceSampling(temperature=0.0))
    assert token == int(torch.from_numpy(logits).argmax())
    assert sample(logits, DeviceSampling(uniform=0.9, min_p=1.0)) in np.flatnonzero(logits == logits[token])


@given(rows, samplings)
def test_the_lowest_and_the_highest_number_take_the_first_and_the_last_kept(
    logits: Row, sampling: DeviceSampling
) -> None:
    kept = np.flatnonzero(kept_weights(logits, sampling))
    for uniform, token in ((0.0, kept[0]), (1 - 2.0**-53, kept[-1])):
        limits = DeviceSampling(uniform, sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k)
        assert sample(logits, limits) == token


def test_a_full_vocabulary_of_equals_does_not_overflow() -> None:
    logits = np.zeros(2**18, np.float32)
    assert int(weights(logits, 1.0).sum(dtype=np.uint64)) == 2**63
    for uniform in (0.0, 0.25, 0.7, 1 - 2.0**-53):
        assert sample(logits, DeviceSampling(uniform=uniform)) == math.floor(uniform * 2**18)
    assert np.count_nonzero(kept_weights(logits, DeviceSampling(top_p=0.5))) == 2**17
    assert np.count_nonzero(kept_weights(logits, DeviceSampling(top_k=5))) == 2**18


@pytest.mark.parametrize("bad", [[0.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_unusable_logits_give_no_token(bad: list[float]) -> None:
    for temperature in (0.0, 1.0):
        assert sample(np.array(bad, np.float32), DeviceSampling(temperature=temperature)) == -1


def test_extreme_temperatures() -> None:
    logits = np.array([1e30, -1e30, 1e29, -math.inf], np.float32)
    assert sample(logits, DeviceSampling(uniform=0.999, temperature=1e-30)) == 0
    assert sample(logits, DeviceSampling(uniform=0.999, temperature=float(np.float32(3e38)))) == 2
