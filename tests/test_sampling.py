"""Sampling: what each filter keeps, how draws are seeded, and which parameters are refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fut_runtime.sampling import (
    Sampler,
    SamplingError,
    SamplingParams,
    apply_repetition_penalty,
    apply_temperature,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    token_logprobs,
)

# Coarse values, so that ties occur.
rows = st.lists(st.integers(-40, 40), min_size=1, max_size=40).map(lambda values: torch.tensor(values) / 4)


def kept(logits: torch.Tensor) -> set[int]:
    return set((logits > -math.inf).nonzero().flatten().tolist())


@given(rows, st.floats(0.01, 1))
def test_top_p_keeps_the_shortest_prefix_that_reaches_p(logits: torch.Tensor, p: float) -> None:
    probability = logits.double().softmax(-1).tolist()
    order = sorted(range(len(probability)), key=lambda i: (-probability[i], i))
    result = keep_top_p(logits, p)
    n = len(kept(result))
    assert kept(result) == set(order[:n])
    mass = sum(probability[i] for i in order[:n])
    assert mass >= p - 1e-9
    assert n == 1 or mass - probability[order[n - 1]] < p + 1e-9
    assert torch.equal(result[order[:n]], logits[order[:n]])


@given(rows, st.integers(0, 50))
def test_top_k_keeps_k_and_ties_of_the_last(logits: torch.Tensor, k: int) -> None:
    values = sorted(logits.tolist(), reverse=True)
    kth = values[min(k, len(values)) - 1] if k else values[-1]
    assert kept(keep_top_k(logits, k)) == {i for i, v in enumerate(logits.tolist()) if v >= kth}


@given(rows, st.floats(0.001, 1))
def test_min_p_keeps_what_is_probable_enough_next_to_the_best(logits: torch.Tensor, p: float) -> None:
    probability = logits.double().softmax(-1)
    ratio = (probability / probability.max()).tolist()
    result = kept(keep_min_p(logits, p))
    assert int(logits.argmax()) in result
    for i, r in enumerate(ratio):
        if abs(r - p) > 1e-9:
            assert (i in result) == (r > p)


@given(rows, st.sets(st.integers(0, 39)), st.floats(0.1, 10))
def test_repetition_penalty_moves_seen_tokens_only(logits: torch.Tensor, seen: set[int], penalty: float) -> None:
    seen = {i for i in seen if i < len(logits)}
    result = apply_repetition_penalty(logits, [*seen, *seen], penalty)
    for i, (before, after) in enumerate(zip(logits.tolist(), result.tolist(), strict=True)):
        expected = before if i not in seen else (before / penalty if before > 0 else before * penalty)
        assert after == pytest.approx(expected, rel=1e-5)


def test_filters_work_on_batches_of_rows() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    for name, function in {
        "temperature": lambda x: apply_temperature(x, 0.7),
        "top_k": lambda x: keep_top_k(x, 5),
        "top_p": lambda x: keep_top_p(x, 0.6),
        "min_p": lambda x: keep_min_p(x, 0.2),
    }.items():
        assert torch.equal(function(logits), torch.stack([function(row) for row in logits])), name


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = torch.tensor([1e30, -1e30, 1e29])
    assert draw(apply_temperature(logits, 1e-30), 0.999) == 0


@given(rows, st.floats(0, 1, exclude_max=True))
def test_draw_inverts_the_distribution(logits: torch.Tensor, uniform: float) -> None:
    logits = keep_top_k(logits, 3)
    token = draw(logits, uniform)
    cumulative = logits.double().softmax(-1).cumsum(-1).tolist()
    assert logits[token] > -math.inf
    assert (cumulative[token - 1] if token else 0.0) <= uniform + 1e-12
    assert uniform <= cumulative[token] + 1e-12


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    sampler = Sampler(SamplingParams(temperature=1.0, seed=7), [])
    counts = torch.bincount(torch.tensor([sampler.choose(logits)[0] for _ in range(4000)]), minlength=3) / 4000
    assert torch.allclose(counts, torch.tensor([0.5, 0.3, 0.2]), atol=0.03)


def test_a_seed_fixes_the_draws_whatever_happens_elsewhere() -> None:
    logits = torch.randn(20, 100, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=1.5, top_p=0.9, seed=3)
    alone = [Sampler(params, []).choose(row)[0] for row in logits[:1]]
    one, other = Sampler(params, []), Sampler(SamplingParams(temperature=2.0, seed=4), [])
    together = []
    for row in logits:
        together.append(one.choose(row)[0])
        other.choose(row)
        torch.rand(5)
    again = Sampler(params, [])
    assert together == [again.choose(row)[0] for row in logits]
    assert together[:1] == alone
    unseeded = [[s.choose(row)[0] for row in logits] for s in (Sampler(SamplingParams(temperature=2.0), []),) * 2]
    assert unseeded[0] != unseeded[1]


def test_greedy_takes_the_first_of_equals_and_minds_the_penalty() -> None:
    assert Sampler(SamplingParams(), []).choose(torch.tensor([1.0, 2.0, 2.0]))[0] == 1
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), [1])
    logits = torch.tensor([1.0, 3.0, 2.9])
    assert [sampler.choose(logits)[0] for _ in range(3)] == [2, 1, 1]


def test_logprobs_are_the_models_own() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0])
    result = token_logprobs(logits, 2, 2)
    expected = logits.double().log_softmax(-1)
    assert result.logprob == pytest.approx(expected[2].item())
    assert [i for i, _ in result.top] == [0, 1]
    assert [v for _, v in result.top] == pytest.approx(expected[:2].tolist())
    params = SamplingParams(temperature=5.0, top_k=1, repetition_penalty=3.0, logprobs=0)
    token, logprobs = Sampler(params, [1]).choose(logits)
    assert logprobs is not None and logprobs.top == ()
    assert logprobs.logprob == pytest.approx(expected[token].item())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    with pytest.raises(SamplingError, match="not finite"):
        Sampler(SamplingParams(), []).choose(torch.tensor([0.0, bad]))
    with pytest.raises(SamplingError, match="not finite"):
        Sampler(SamplingParams(), []).choose(torch.full((3,), -math.inf))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 2.0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("top_k", True),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("seed", -1),
        ("seed", 2**63),
        ("logprobs", -1),
        ("stop", ("",)),
        ("stop", (3,)),
    ],
)
def test_parameters_outside_their_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(SamplingError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_parameters_are_normalised() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(top_p=0.5, seed=1, min_p=0.0).ignored_when_greedy == ("top_p", "seed")
    assert SamplingParams(temperature=1.0, top_p=0.5).ignored_when_greedy == ()


def test_filters_equal_those_of_transformers() -> None:
    process = pytest.importorskip("transformers.generation.logits_process", reason="transformers is not installed")
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(2)) * 3
    ids = torch.randint(0, 200, (4, 30), generator=torch.Generator().manual_seed(3))
    params = SamplingParams(temperature=0.7, top_k=40, top_p=0.8, min_p=0.05, repetition_penalty=1.3)
    chain = [
        process.RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        process.TemperatureLogitsWarper(params.temperature),
        process.TopKLogitsWarper(params.top_k),
        process.TopPLogitsWarper(params.top_p),
        process.MinPLogitsWarper(params.min_p),
    ]
    expected = logits
    for step in chain:
        expected = step(ids, expected)
    for row, seen, theirs in zip(logits, ids.tolist(), expected, strict=True):
        scores = apply_temperature(apply_repetition_penalty(row, seen, params.repetition_penalty), params.temperature)
        ours = keep_min_p(keep_top_p(keep_top_k(scores, params.top_k), params.top_p), params.min_p)
        assert kept(ours) == kept(theirs) != kept(row)
        assert torch.allclose(ours.softmax(-1), theirs.double().softmax(-1), atol=1e-6)
