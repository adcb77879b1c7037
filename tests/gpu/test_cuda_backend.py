"""Whole models on the CUDA backend: against the reference, alone and in company, cancelled, released, side by side."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fut_convert import convert
from fut_runtime.artifact.reader import Artifact
from fut_runtime.cuda import load as cuda
from fut_runtime.cuda.backend import CudaBackend
from fut_runtime.cuda.decoder import Row
from fut_runtime.cuda.library import CudaCallError
from fut_runtime.cuda.structs import Status
from fut_runtime.engine import Engine
from fut_runtime.errors import DeviceMemoryError
from fut_runtime.reference import backend as reference
from fut_runtime.sampling import SamplingParams
from odd_checkpoints import ODD_CHECKPOINTS
from reference_noise import NOISE_MARGIN, logits_and_noise

pytestmark = pytest.mark.usefixtures("built")

FORMATS = ["e4m3", "int4", "bf16"]
MODES = [("int4", "int4"), ("fp8", "int4"), ("bf16", "bf16"), ("int4", "bf16")]


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return converted(smollm2_dir, tmp_path_factory.mktemp("smollm2") / "out")


@pytest.fixture(scope="module")
def base(odd_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return converted(odd_checkpoint("base"), tmp_path_factory.mktemp("base") / "out")


@pytest.fixture
def backend(base: Artifact) -> Iterator[CudaBackend]:
    loaded = cuda.load(base, prefill_mode="decode")
    yield loaded
    loaded.release()


def converted(checkpoint: Path, out: Path) -> Artifact:
    overrides = {"weights": FORMATS, "calibration.enabled": False}
    return Artifact.open(convert(str(checkpoint), out, overrides=overrides, device="cuda").path)


def prompt_of(length: int, seed: int, vocab: int = 1024) -> list[int]:
    return torch.randint(17, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def on_the_card(artifact: Artifact, ids: list[int], first: int, decode_mode: str, kv_cache: str) -> Tensor:
    """Logits [len(ids) - first + 1, vocab]: a prompt of `first` tokens in one call, then a token a call."""
    backend = cuda.load(artifact, decode_mode=decode_mode, kv_cache=kv_cache, prefill_mode="decode")
    try:
        request = backend.open_request(len(ids))
        rows = [backend.prefill([(request, ids[:first])])]
        rows += [backend.decode([(request, token)]) for token in ids[first:]]
        return torch.cat(rows)
    finally:
        backend.release()


def compare(artifact: Artifact, ids: list[int], first: int, decode_mode: str, kv_cache: str) -> None:
    found = on_the_card(artifact, ids, first, decode_mode, kv_cache).double()
    loaded = reference.load(artifact, device="cuda", decode_mode=decode_mode, prefill_mode="decode", kv_cache=kv_cache)
    exact, noise = logits_and_noise(loaded, ids)
    exact = exact[first - 1 :]
    assert found.isfinite().all()
    difference = (found - exact).square().mean().sqrt().item()
    print(f"{decode_mode} {kv_cache}: rms difference {difference:.2e}, noise {noise:.2e}")
    assert difference <= NOISE_MARGIN * noise
    best = exact.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > 12 * NOISE_MARGIN * noise
    assert torch.equal(found.argmax(-1)[clear], exact.argmax(-1)[clear])


@pytest.mark.parametrize(("decode_mode", "kv_cache"), MODES)
def test_a_real_model_gives_the_references_logits(smollm2: Artifact, decode_mode: str, kv_cache: str) -> None:
    text = "Bread rises because yeast eats sugar and gives off carbon dioxide, which the dough's gluten holds. " * 4
    with Engine(smollm2.path, backend="reference", device="cpu") as engine:
        ids = engine.encode(text)
    compare(smollm2, ids[:150], 70, decode_mode, kv_cache)


@pytest.mark.parametrize(("decode_mode", "kv_cache"), MODES)
@pytest.mark.parametrize("name", list(ODD_CHECKPOINTS))
def test_odd_models_give_the_references_logits(
    name: str, decode_mode: str, kv_cache: str, odd_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    artifact = converted(odd_checkpoint(name), tmp_path / "out")
    compare(artifact, prompt_of(96, seed=1), 70, decode_mode, kv_cache)


def run_alone(backend: CudaBackend, prompt: list[int], continuation: Sequence[int]) -> list[Tensor]:
    request = backend.open_request(len(prompt) + len(continuation))
    rows = [backend.prefill([(request, prompt)])[0]]
    rows += [backend.decode([(request, token)])[0] for token in continuation]
    backend.close_request(request)
    return rows


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Bit by bit."""
    assert len(found) == len(expected)
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), f"step {step}: {int((a != b).sum())} logits differ"


@pytest.mark.parametrize("count", [2, 7, 8, 9, 16, 33, 64])
def test_a_request_gets_the_same_logits_alone_and_in_company(backend: CudaBackend, count: int) -> None:
    lengths = random.Random(count).choices(range(1, 200), k=count)
    prompts = [prompt_of(n, seed=i) for i, n in enumerate(lengths)]
    continuation = prompt_of(5, seed=99)
    requests = [backend.open_request(len(p) + 5) for p in prompts]
    rows = [backend.prefill(list(zip(requests, prompts, strict=True)))]
    rows += [backend.decode([(r, token) for r in requests]) for token in continuation]
    for request in requests:
        backend.close_request(request)
    for index in {0, 1, count // 2, count - 1}:
        assert_same([row[index] for row in rows], run_alone(backend, prompts[index], continuation))


def test_requests_join_and_leave_between_steps(backend: CudaBackend) -> None:
    """At random, with pages and slots that change hands; every request gets what it gets alone."""
    chance = random.Random(5)
    waiting = [
        (prompt_of(chance.randint(1, 150), seed=i), prompt_of(chance.randint(1, 25), 100 + i)) for i in range(24)
    ]
    expected = [run_alone(backend, prompt, continuation) for prompt, continuation in waiting]
    found: list[list[Tensor]] = [[] for _ in waiting]
    running: dict[int, int] = {}
    next_index = 0
    while next_index < len(waiting) or running:
        joining = []
        while next_index < len(waiting) and len(running) < 9 and chance.random() < 0.5:
            prompt, continuation = waiting[next_index]
            running[next_index] = backend.open_request(len(prompt) + len(continuation))
            joining.append(next_index)
            next_index += 1
        if joining:
            rows = backend.prefill([(running[i], waiting[i][0]) for i in joining])
            for i, row in zip(joining, rows, strict=True):
                found[i].append(row)
        members = [i for i in running if chance.random() < 0.8]
        chance.shuffle(members)
        for i in [i for i in members if len(found[i]) > len(waiting[i][1])]:
            backend.close_request(running.pop(i))
            members.remove(i)
        if members:
            rows = backend.decode([(running[i], waiting[i][1][len(found[i]) - 1]) for i in members])
            for i, row in zip(members, rows, strict=True):
                found[i].append(row)
    for got, wanted in zip(found, expected, strict=True):
        assert_same(got, wanted)


def test_a_prompt_may_be_read_in_any_chunks(backend: CudaBackend) -> None:
    prompt = prompt_of(190, seed=3)
    expected = run_alone(backend, prompt, [1, 2])
    for chunk in (1, 7, 64, 100):
        request = backend.open_request(192)
        for first in range(0, len(prompt), chunk):
            last = backend.prefill([(request, prompt[first : first + chunk])])
        assert_same([last[0], backend.decode([(request, 1)])[0], backend.decode([(request, 2)])[0]], expected)
        backend.close_request(request)


def test_a_cancelled_request_leaves_nothing_behind(base: Artifact) -> None:
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    prompts = [prompt_of(n, seed=n) for n in (20, 90, 5)]
    with Engine.from_backend(cuda.load(base, prefill_mode="decode")) as engine:
        expected = [c.token_ids for c in engine.generate(prompts, params)]
        for stop_after in (1, 7):
            events = engine.events(prompts, params)
            for _ in range(stop_after):
                next(events)
            events.close()
        assert [c.token_ids for c in engine.generate(prompts, params)] == expected


def test_a_refused_step_leaves_the_backend_usable(backend: CudaBackend) -> None:
    prompt = prompt_of(20, seed=1)
    expected = run_alone(backend, prompt, [4, 5])
    request = backend.open_request(30)
    backend.prefill([(request, prompt)])
    with pytest.raises(CudaCallError) as error:
        backend._decoder.step([Row(1, 20, 0)] * 65, [0])
    assert error.value.status is Status.INVALID
    assert_same([backend.decode([(request, 4)])[0], backend.decode([(request, 5)])[0]], expected[1:])


def test_tokens_drawn_on_the_card_are_those_drawn_from_its_logits(base: Artifact) -> None:
    prompts = [prompt_of(n, seed=n) for n in (3, 40, 17, 64)]
    params = [
        SamplingParams(max_new_tokens=40, ignore_eos=True),
        SamplingParams(max_new_tokens=40, temperature=0.7, top_p=0.9, seed=1, ignore_eos=True),
        SamplingParams(max_new_tokens=40, temperature=1.3, top_k=40, seed=2, ignore_eos=True),
        SamplingParams(max_new_tokens=40, temperature=1.0, min_p=0.05, seed=3, ignore_eos=True),
    ]
    with Engine.from_backend(cuda.load(base, prefill_mode="decode")) as engine:
        drawn = engine.generate(prompts, params)
        # Log-probabilities make the host choose.
        chosen = engine.generate(prompts, [replace(p, logprobs=0) for p in params])
    assert [c.token_ids for c in drawn] == [c.token_ids for c in chosen]


def test_release_gives_all_memory_back(base: Artifact) -> None:
    cuda.load(
        base, prefill_mode="decode"
    ).release()  # what the process keeps from the first load on: the context, kernels, cuBLAS
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    allocated, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    for _ in range(5):
        backend = cuda.load(base, prefill_mode="decode")
        assert torch.cuda.memory_allocated() > allocated
        run_alone(backend, prompt_of(80, seed=1), [1, 2, 3])
        backend.release()
        del backend
        assert torch.cuda.memory_allocated() == allocated
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free - (32 << 20)


def test_two_backends_run_on_two_streams_at_once(base: Artifact) -> None:
    backends = [cuda.load(base, decode_mode=mode, prefill_mode="decode") for mode in ("int4", "fp8")]
    prompts = [prompt_of(n, seed=n) for n in (30, 100)]
    continuation = prompt_of(40, seed=7)
    expected = [[run_alone(backend, prompt, continuation) for prompt in prompts] for backend in backends]
    found: list[list[list[Tensor]]] = [[], []]
    torch.cuda.synchronize()

    def run(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                found[index] = [run_alone(backends[index], prompt, continuation) for prompt in prompts]
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, wanted in zip(found, expected, strict=True):
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            assert_same(a, b)
    for backend in backends:
        backend.release()


def test_a_cache_that_cannot_fit_says_what_it_needs(base: Artifact) -> None:
    before = torch.cuda.memory_allocated()
    with pytest.raises(DeviceMemoryError, match=r"this model needs [\d.]+ GB on cuda:0 \(weights .* are free"):
        cuda.load(base, planned_tokens=base.manifest.model.max_position_embeddings, planned_requests=100_000_000)
    assert torch.cuda.memory_allocated() == before


def test_auto_takes_cuda_and_generates(base: Artifact) -> None:
    with Engine(base.path) as engine:
        assert isinstance(engine.backend, CudaBackend)
        completion = engine.generate([prompt_of(10, seed=1)], SamplingParams(max_new_tokens=5, ignore_eos=True))[0]
    assert len(completion.token_ids) == 5
