"""The CUDA backend over a decoder that keeps tokens in pages instead of computing: rows, positions, pages, failures."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fake_backend import FakeBackend, model_spec
from fut_runtime.backend import Draw
from fut_runtime.cuda.backend import CudaBackend
from fut_runtime.cuda.decoder import Row
from fut_runtime.cuda.library import CudaCallError
from fut_runtime.cuda.memory_plan import MAX_ROWS
from fut_runtime.cuda.pages import PageAllocator
from fut_runtime.cuda.structs import PAGE_TOKENS, Status
from fut_runtime.engine import Engine
from fut_runtime.errors import CacheFullError, FutError
from fut_runtime.sampling import Sampler, SamplingParams

VOCAB = 40


class PagedTokens:
    """Stands in for `Decoder`: the cache holds token ids, and logits are those that FakeBackend gives for them."""

    def __init__(self, pages: int, slots: int) -> None:
        self.pool = torch.full((pages, PAGE_TOKENS), -1)
        self.table: list[Sequence[int]] = [()] * slots
        self.result = torch.zeros(MAX_ROWS, VOCAB)
        self.steps: list[tuple[int, int, bool]] = []
        self.fail_at: int | None = None
        self.closed = False

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        self.table[slot] = tuple(pages)

    def step(
        self,
        rows: Sequence[Row],
        head_rows: Sequence[int],
        draws: Sequence[Draw | None] | None = None,
        *,
        chunked: bool = False,
    ) -> None:
        assert 0 < len(rows) <= MAX_ROWS and list(head_rows) == sorted(set(head_rows))
        if self.fail_at == len(self.steps):
            self.fail_at = None
            raise CudaCallError("fut_decoder_step refused its arguments", Status.INVALID)
        assert chunked or len({row.slot for row in rows}) == len(rows)
        self.steps.append((len(rows), len(head_rows), chunked))
        for row in rows:
            self.pool[self.table[row.slot][row.position // PAGE_TOKENS], row.position % PAGE_TOKENS] = row.token
        for place, index in enumerate(head_rows):
            row = rows[index]
            held = [
                int(self.pool[self.table[row.slot][i // PAGE_TOKENS], i % PAGE_TOKENS]) for i in range(row.position + 1)
            ]
            assert min(held) >= 0
            self.result[place] = logits_of(held)
        self.draws = draws

    def tokens(self, count: int) -> list[int]:
        assert self.draws is not None and len(self.draws) == count
        return [
            choose(row, draw) if draw is not None else int(row.argmax())
            for row, draw in zip(self.result[:count], self.draws, strict=True)
        ]

    def logits(self, count: int) -> torch.Tensor:
        return self.result[:count]

    def close(self) -> None:
        self.closed = True


def logits_of(tokens: Sequence[int]) -> torch.Tensor:
    fake = FakeBackend(model_spec(VOCAB, context=len(tokens)))
    return fake.prefill([(fake.open_request(len(tokens)), tokens)])[0]


def choose(row: torch.Tensor, draw: Draw) -> int:
    """What the host's sampler chooses with the draw's number."""
    sampler = Sampler(SamplingParams(temperature=draw.temperature, top_k=draw.top_k, top_p=draw.top_p), [])
    sampler._uniform = draw.uniform
    return sampler.choose(row)[0]


def make(pages: int = 30, slots: int = 8, context: int = 500) -> tuple[CudaBackend, PagedTokens]:
    decoder = PagedTokens(pages, slots)
    spec = model_spec(VOCAB, context=context)
    allocator = PageAllocator(pages, slots)
    backend = CudaBackend(
        decoder,  # type: ignore[arg-type]
        allocator,
        spec,
        torch.device("cpu"),
        "int4",
        context,
        [object()],
    )
    return backend, decoder


@pytest.mark.parametrize("count", [1, 64, 65, 200])
def test_a_prompt_gives_logits_after_every_token(count: int) -> None:
    backend, decoder = make()
    ids = [(7 * i + 3) % VOCAB for i in range(count + 10)]
    request = backend.open_request(len(ids))
    backend.prefill([(request, ids[:10])])
    rows = torch.cat([part.clone() for part in backend.prompt_logits(request, ids[10:])])
    assert torch.equal(rows, torch.stack([logits_of(ids[: i + 1]) for i in range(10, len(ids))]))
    assert [step[0] for step in decoder.steps[1:]] == [MAX_ROWS] * (count // MAX_ROWS) + [count % MAX_ROWS] * bool(
        count % MAX_ROWS
    )
    with pytest.raises(FutError, match=f"holds {len(ids)} tokens"):
        next(backend.prompt_logits(request, [1]))


@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=200), min_size=1, max_size=5),
    st.integers(1, 150),
)
def test_prompts_in_chunks_and_together_give_what_each_gives_alone(prompts: list[list[int]], chunk: int) -> None:
    backend, decoder = make()
    handles = [backend.open_request(len(p) + 5) for p in prompts]
    last = {}
    for first in range(0, max(map(len, prompts)), chunk):
        chunks = [(h, p[first : first + chunk]) for h, p in zip(handles, prompts, strict=True) if p[first:]]
        for (handle, _), row in zip(chunks, backend.prefill(chunks), strict=True):
            last[handle] = row
    for handle, prompt in zip(handles, prompts, strict=True):
        assert torch.equal(last[handle], logits_of(prompt))
    for extra in (3, 7):
        rows = backend.decode([(h, extra) for h in reversed(handles)])
        for prompt in prompts:
            prompt.append(extra)
        for row, prompt in zip(rows, reversed(prompts), strict=True):
            assert torch.equal(row, logits_of(prompt))
    assert decoder.steps[0][2] and not decoder.steps[-1][2]


def test_steps_are_as_full_as_they_can_be() -> None:
    backend, decoder = make()
    a, b = backend.open_request(200), backend.open_request(100)
    backend.prefill([(a, [1] * 70), (b, [2] * 60)])
    assert decoder.steps == [(64, 0, True), (64, 1, True), (2, 1, True)]
    many = make(pages=200, slots=100)
    handles = [many[0].open_request(5) for _ in range(70)]
    rows = many[0].prefill([(h, [i % VOCAB]) for i, h in enumerate(handles)])
    assert torch.equal(rows[69], logits_of([69 % VOCAB]))
    rows = many[0].decode([(h, 3) for h in handles])
    assert [rows_in_step for rows_in_step, _, _ in many[1].steps] == [64, 6, 64, 6]
    assert torch.equal(rows[1], logits_of([1, 3])) and torch.equal(rows[69], logits_of([69 % VOCAB, 3]))


def test_logits_of_one_call_outlive_the_next() -> None:
    backend, _ = make()
    request = backend.open_request(10)
    first = backend.prefill([(request, [1, 2])])
    second = backend.decode([(request, 3)])
    backend.decode([(request, 4)])
    assert torch.equal(first[0], logits_of([1, 2])) and torch.equal(second[0], logits_of([1, 2, 3]))


def test_pages_of_a_request_that_left_serve_the_next() -> None:
    backend, decoder = make(pages=4, slots=4, context=256)
    first = backend.open_request(200)
    backend.prefill([(first, [5] * 200)])
    with pytest.raises(CacheFullError):
        backend.open_request(1)
    backend.close_request(first)
    second = backend.open_request(130)
    third = backend.open_request(64)
    assert torch.equal(backend.prefill([(third, [6] * 3), (second, [7])])[0], logits_of([6] * 3))
    assert torch.equal(backend.decode([(second, 8)])[0], logits_of([7, 8]))
    with pytest.raises(FutError, match=f"request {first} is not open"):
        backend.decode([(first, 1)])
    backend.release()
    backend.release()
    assert decoder.closed


def test_a_step_that_is_refused_leaves_requests_as_they_were() -> None:
    backend, decoder = make()
    request = backend.open_request(300)
    backend.prefill([(request, [1, 2, 3])])
    decoder.fail_at = len(decoder.steps) + 1  # the second step of the next prompt
    with pytest.raises(CudaCallError, match="refused"):
        backend.prefill([(request, [4] * 100)])
    assert torch.equal(backend.prefill([(request, [5] * 100)])[0], logits_of([1, 2, 3] + [5] * 100))
    decoder.fail_at = len(decoder.steps)
    with pytest.raises(CudaCallError, match="refused"):
        backend.decode([(request, 9)])
    assert torch.equal(backend.decode([(request, 8)])[0], logits_of([1, 2, 3] + [5] * 100 + [8]))


def test_refuses_what_cannot_be_before_any_step() -> None:
    backend, decoder = make(context=100)
    with pytest.raises(FutError, match=r"101 tokens, expected 1 to 100: the model has 100 positions"):
        backend.open_request(101)
    request = backend.open_request(4)
    for chunks, message in (
        ([(request, [1] * 5)], "holds 0 tokens and would need 5, but was opened for 4"),
        ([(request, [])], "at least one token"),
        ([(request, [1]), (request, [2])], "each once"),
        ([], "at least one request"),
        ([(request, [VOCAB])], f"token id {VOCAB} is outside the vocabulary"),
        ([(request, [-1])], "token id -1 is outside"),
    ):
        with pytest.raises(FutError, match=message):
            backend.prefill(chunks)
    with pytest.raises(FutError, match="each once"):
        backend.decode([(request, 1), (request, 2)])
    with pytest.raises(FutError, match="1 draws for 0 tokens"):
        backend.decode_and_draw([], [None])
    assert decoder.steps == []


def test_tokens_are_drawn_where_a_draw_says_how() -> None:
    backend, decoder = make()
    requests = [backend.open_request(10) for _ in range(3)]
    backend.prefill([(r, [i]) for i, r in enumerate(requests)])
    draw = Draw(temperature=1.0, top_k=5, uniform=0.9)
    tokens, logits = backend.decode_and_draw([(r, 7) for r in requests], [Draw(), None, draw])
    expected = [logits_of([i, 7]) for i in range(3)]
    assert torch.equal(logits, torch.stack(expected))
    assert tokens == [int(expected[0].argmax()), None, choose(expected[2], draw)]
    assert backend.decode_and_draw([(requests[0], 1)], [None])[0] == [None] and decoder.draws is None
    decoder.tokens = lambda count: [-1] * count  # type: ignore[method-assign]
    assert backend.decode_and_draw([(requests[0], 1)], [Draw()])[0] == [None]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generation_is_that_of_a_backend_that_only_gives_logits(temperature: float) -> None:
    """Drawing in the backend or here, alone or with requests that cannot be drawn there: the same tokens."""
    prompts = [[1, 2], [3] * 90, [4, 5, 6], [7]]
    plain = SamplingParams(max_new_tokens=12, temperature=temperature, top_k=20, seed=3, ignore_eos=True)
    wants_logprobs = SamplingParams(max_new_tokens=9, temperature=temperature, seed=4, logprobs=1, ignore_eos=True)
    params = [plain, wants_logprobs, plain, plain]
    reference = Engine.from_backend(FakeBackend(model_spec(VOCAB, context=500)))
    backend, decoder = make()
    found = Engine.from_backend(backend, max_batch=3).generate(prompts, params)
    expected = reference.generate(prompts, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert found[1].logprobs == expected[1].logprobs
    assert decoder.draws is not None


def test_a_request_waits_until_others_make_room() -> None:
    """Three requests of two pages each in a cache of four pages."""
    backend, _ = make(pages=4, context=128)
    engine = Engine.from_backend(backend)
    prompts = [[i] * 60 for i in range(3)]
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    together = engine.generate(prompts, params)
    assert [len(c.token_ids) for c in together] == [20] * 3
    for prompt, completion in zip(prompts, together, strict=True):
        assert engine.generate([prompt], params)[0].token_ids == completion.token_ids
    held = backend.open_request(128), backend.open_request(128)
    with pytest.raises(CacheFullError):
        engine.generate(prompts, params)
    assert len(held) == 2
