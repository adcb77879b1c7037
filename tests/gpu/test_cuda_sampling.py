"""Tokens chosen on the card are those of the host sampler, and bit for bit those of its fixed-point twin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from device_sampling_twin import DeviceSampling, sample
from fut_runtime.cuda.library import CudaCallError, library
from fut_runtime.cuda.structs import Sampling
from fut_runtime.sampling import apply_temperature, draw, keep_min_p, keep_top_k, keep_top_p

VOCABULARIES = [1, 31, 1000, 49152, 128256, 256000]
UNWRITTEN = -7


def structures(samplings: Sequence[DeviceSampling]) -> Tensor:
    """Device bytes of `fut_sampling` [rows]."""
    array = (Sampling * len(samplings))(
        *(Sampling(s.uniform, s.temperature, s.top_p, s.min_p, s.top_k) for s in samplings)
    )
    return torch.frombuffer(bytearray(bytes(array)), dtype=torch.uint8).cuda()


def launch(logits: Tensor, samplings: Tensor, tokens: Tensor) -> None:
    rows, vocab = logits.shape
    stream = torch.cuda.current_stream().cuda_stream
    library().call(
        "fut_sample", logits.data_ptr(), samplings.data_ptr(), tokens.data_ptr(), rows, vocab, None, 0, stream
    )


def tokens_of(logits: Tensor, samplings: Sequence[DeviceSampling]) -> list[int]:
    """What the card chooses for logits [rows, V]; nothing but the rows' tokens is written."""
    tokens = torch.full((len(samplings) + 8,), UNWRITTEN, dtype=torch.int32, device="cuda")
    launch(logits, structures(samplings), tokens)
    found: list[int] = tokens.tolist()
    assert found[len(samplings) :] == [UNWRITTEN] * 8
    return found[: len(samplings)]


def host_token(logits: Tensor, sampling: DeviceSampling) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    scores = keep_top_k(apply_temperature(logits, sampling.temperature), sampling.top_k)
    return draw(keep_min_p(keep_top_p(scores, sampling.top_p), sampling.min_p), sampling.uniform)


def logits_like(kind: str, vocab: int, seed: int) -> Tensor:
    random = np.random.default_rng(seed)
    values = {
        "random weights": lambda: random.standard_normal(vocab),
        "a few likely": lambda: random.standard_normal(vocab) * 3 + (random.random(vocab) < 1e-3) * 12,
        "ties": lambda: random.integers(-12, 12, vocab) / 4,
        "equal": lambda: np.full(vocab, 3.25),
        "wide": lambda: random.standard_normal(vocab) * 1e3,
        "masked": lambda: np.where(random.random(vocab) < 0.7, -np.inf, random.standard_normal(vocab)),
        "near zero": lambda: random.standard_normal(vocab) * 1e-30,
    }[kind]()
    values[0] = max(values[0], -5.0)
    return torch.from_numpy(values.astype(np.float32))


KINDS = ["random weights", "a few likely", "ties", "equal", "wide", "masked", "near zero"]


def filters(vocab: int, seed: int) -> list[DeviceSampling]:
    """Each filter alone, all together, and the ends of their ranges; with random numbers."""
    random = np.random.default_rng(seed)
    choices = [
        DeviceSampling(temperature=0.0),
        DeviceSampling(),
        DeviceSampling(temperature=0.7, top_k=50),
        DeviceSampling(top_p=0.9),
        DeviceSampling(temperature=1.3, top_p=0.83, min_p=0.05, top_k=max(1, vocab // 30)),
        DeviceSampling(top_k=1),
        DeviceSampling(top_p=1e-6),
        DeviceSampling(top_p=0.99999),
        DeviceSampling(min_p=1.0),
        DeviceSampling(min_p=0.013),
        DeviceSampling(temperature=1e-30, top_k=9, top_p=0.5),
        DeviceSampling(temperature=1e-3, top_p=0.73),
        DeviceSampling(temperature=1e30, top_p=0.517, top_k=max(1, vocab // 2)),
        DeviceSampling(temperature=2.0, top_k=vocab),
    ]
    return [replace(s, uniform=float(random.random())).rounded() for s in choices]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_tokens_are_the_hosts(vocab: int, kind: str) -> None:
    samplings = filters(vocab, vocab)
    logits = torch.stack([logits_like(kind, vocab, seed) for seed in range(len(samplings))])
    found = tokens_of(logits.cuda(), samplings)
    expected = [sample(row.numpy(), s) for row, s in zip(logits, samplings, strict=True)]
    assert found == expected
    assert found == [host_token(row, s) for row, s in zip(logits, samplings, strict=True)]


@pytest.mark.parametrize("vocab", [31, 49152, 128256])
def test_a_row_gets_the_same_token_alone_and_in_any_company(vocab: int) -> None:
    samplings = (filters(vocab, 1) * 5)[:64]
    logits = torch.stack([logits_like(KINDS[i % len(KINDS)], vocab, i) for i in range(64)]).cuda()
    together = tokens_of(logits, samplings)
    for _ in range(5):
        assert tokens_of(logits, samplings) == together
    for rows in (1, 2, 7, 33):
        assert tokens_of(logits[:rows], samplings[:rows]) == together[:rows]
    assert [tokens_of(logits[i : i + 1].clone(), samplings[i : i + 1])[0] for i in range(64)] == together


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().cuda()
    uniforms = np.random.default_rng(0).random(4000)
    found = tokens_of(logits.expand(4000, 3).contiguous(), [DeviceSampling(float(u)) for u in uniforms])
    counts = np.bincount(found, minlength=3) / 4000
    assert np.abs(counts - [0.5, 0.3, 0.2]).max() < 0.03


def test_the_first_of_equals_and_both_zeros() -> None:
    logits = torch.zeros(2, 100_000)
    logits[0, ::2] = -0.0
    logits[1, [99_999, 5, 70_000]] = 1.0
    assert tokens_of(logits.cuda(), [DeviceSampling(temperature=0.0)] * 2) == [0, 5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_unusable_logits_spoil_their_own_row_only(bad: float, temperature: float) -> None:
    logits = torch.randn(4, 70_000, generator=torch.Generator().manual_seed(3))
    logits[1, 69_999] = bad
    logits[2] = -math.inf
    samplings = [DeviceSampling(0.4, temperature, top_p=0.9)] * 4
    found = tokens_of(logits.cuda(), samplings)
    assert found[1:3] == [-1, -1]
    good = [0, 3]
    assert [found[i] for i in good] == [sample(logits[i].numpy(), samplings[i].rounded()) for i in good]


def test_a_captured_launch_reads_its_parameters_anew() -> None:
    logits = torch.randn(3, 128256, generator=torch.Generator().manual_seed(4))
    on_card = logits.cuda()
    parameters = structures([DeviceSampling()] * 3)
    tokens = torch.zeros(3, dtype=torch.int32, device="cuda")
    launch(on_card, parameters, tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(on_card, parameters, tokens)
    for seed in range(5):
        samplings = filters(128256, seed)[seed : seed + 3]
        parameters.copy_(structures(samplings))
        graph.replay()
        assert tokens.tolist() == [sample(row.numpy(), s) for row, s in zip(logits, samplings, strict=True)]


def test_sizes_out_of_range_are_refused() -> None:
    logits = torch.zeros(1, 8, device="cuda")
    tokens = torch.zeros(1, dtype=torch.int32, device="cuda")
    parameters = structures([DeviceSampling()])
    for rows, vocab in ((0, 8), (1, 0), (1, 2**18 + 1)):
        with pytest.raises(CudaCallError, match="rows of"):
            library().call(
                "fut_sample", logits.data_ptr(), parameters.data_ptr(), tokens.data_ptr(), rows, vocab, None, 0, None
            )
    with pytest.raises(CudaCallError, match="must not be null"):
        library().call("fut_sample", None, parameters.data_ptr(), tokens.data_ptr(), 1, 8, None, 0, None)
