"""Prompts through prefill as the CUDA backend hands them on: runs, pages of the history, what takes the decode path."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fake_backend import model_spec
from fut_runtime.cuda.activations import ActivationState
from fut_runtime.cuda.backend import CudaBackend
from fut_runtime.cuda.pages import PageAllocator
from fut_runtime.cuda.prefill import Chunk
from fut_runtime.cuda.prompt_path import PromptPath
from fut_runtime.cuda.structs import PAGE_TOKENS
from fut_runtime.errors import CacheFullError, FutError, UnsupportedError
from test_paged_requests import VOCAB, PagedTokens, logits_of

SLOTS = 6


class PagedPrompts:
    """Stands in for `Prefill`: the history holds token ids, and so does the decoder's cache afterwards."""

    def __init__(self, decoder: PagedTokens, pages: int, rows: int, requests: int = SLOTS) -> None:
        self.max_rows, self.max_requests, self.history_pages = rows, requests, pages
        self.runs = 0
        self.history = torch.full((pages, PAGE_TOKENS), -1)
        self.table: list[Sequence[int]] = [()] * SLOTS
        self.decoder = decoder
        self.done: list[tuple[list[tuple[int, int, int]], list[int]]] = []
        self.rows: list[list[int]] = []

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        self.table[slot] = tuple(pages)

    def run(
        self,
        chunks: Sequence[Chunk],
        *,
        ended: Sequence[int] = (),
        heads: Sequence[int] = (),
        logits: Tensor | None = None,
    ) -> None:
        assert len({chunk.slot for chunk in chunks}) == len(chunks) <= self.max_requests
        assert 0 < sum(len(chunk.ids) for chunk in chunks) <= self.max_rows
        self.runs += 1
        self.done.append(([(c.slot, c.position, len(c.ids)) for c in chunks], list(ended)))
        self.rows = []
        for chunk in chunks:
            for place, token in enumerate(chunk.ids, chunk.position):
                for pool, pages in ((self.history, self.table), (self.decoder.pool, self.decoder.table)):
                    pool[pages[chunk.slot][place // PAGE_TOKENS], place % PAGE_TOKENS] = token
                self.rows.append(self.held(chunk.slot, place + 1))
        if logits is not None:
            for index, place in enumerate(heads):
                chunk = chunks[place]
                logits[index] = logits_of(self.held(chunk.slot, chunk.position + len(chunk.ids)))

    def logits(self, first: int, out: Tensor) -> None:
        for i in range(len(out)):
            out[i] = logits_of(self.rows[first + i])

    def held(self, slot: int, count: int) -> list[int]:
        found = [int(self.history[self.table[slot][i // PAGE_TOKENS], i % PAGE_TOKENS]) for i in range(count)]
        assert min(found) >= 0
        return found

    def close(self) -> None:
        self.decoder.closed = True


def make(history_pages: int = 10, rows: int = 100, requests: int = SLOTS) -> tuple[CudaBackend, PagedPrompts]:
    decoder = PagedTokens(30, SLOTS)
    prefill = PagedPrompts(decoder, history_pages, rows, requests)
    path = PromptPath("bf16", prefill, None, SLOTS, {})  # type: ignore[arg-type]
    backend = CudaBackend(
        decoder,  # type: ignore[arg-type]
        PageAllocator(30, SLOTS),
        model_spec(VOCAB, context=900),
        torch.device("cpu"),
        "int4",
        900,
        [],
        path,
    )
    return backend, prefill


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_a_call_is_cut_into_runs_and_ends_with_the_last() -> None:
    backend, prefill = make()
    prompts = [tokens(n, n) for n in (30, 150, 1, 60)]
    requests = [backend.open_request(200 if len(p) > 100 else 70) for p in prompts]
    found = backend.prefill(list(zip(requests, prompts, strict=True)))
    assert torch.equal(found, torch.stack([logits_of(p) for p in prompts]))
    assert [pieces for pieces, _ in prefill.done] == [
        [(0, 0, 30), (1, 0, 70)],
        [(1, 70, 80), (2, 0, 1), (3, 0, 19)],
        [(3, 19, 41)],
    ]
    assert [ended for _, ended in prefill.done] == [[], [], [0, 1, 2, 3]]
    assert backend.prefill_mode == "bf16" and backend.activation_report()["scale_mode"] == "none"


def test_a_run_holds_so_many_requests() -> None:
    backend, prefill = make(requests=2)
    requests = [backend.open_request(5) for _ in range(5)]
    backend.prefill([(request, [1, 2]) for request in requests])
    assert [len(pieces) for pieces, _ in prefill.done] == [2, 2, 1]


def test_chunks_continue_and_decoding_ends_it() -> None:
    backend, prefill = make()
    ids = tokens(160, 1)
    request = backend.open_request(160)
    backend.prefill([(request, ids[:70])])
    assert torch.equal(backend.prefill([(request, ids[70:100])])[0], logits_of(ids[:100]))
    rows = torch.cat([some.clone() for some in backend.prompt_logits(request, ids[100:120])])
    assert torch.equal(rows, torch.stack([logits_of(ids[: 101 + i]) for i in range(20)]))
    assert prefill.done[-1][0] == [(0, 100, 20)] and prefill.runs == 3
    backend.decode([(request, ids[120])])
    # From here on the decode path, in one call with a prompt that prefill takes.
    other = backend.open_request(10)
    found = backend.prefill([(request, ids[121:130]), (other, ids[:5])])
    assert torch.equal(found, torch.stack([logits_of(ids[:130]), logits_of(ids[:5])]))
    assert prefill.runs == 4 and prefill.done[-1][0] == [(1, 0, 5)]
    assert len(list(backend.prompt_logits(request, ids[130:140]))) == 1 and prefill.runs == 4


def test_history_is_shared_out_and_comes_back() -> None:
    backend, _ = make(history_pages=3)
    first = backend.open_request(100)
    second = backend.open_request(64)
    with pytest.raises(CacheFullError, match="leave 0 of 3"):
        backend.open_request(1)
    backend.decode([(second, 1)])
    third = backend.open_request(1)
    backend.close_request(first)
    # Longer than the whole history: by the decode path, whatever is free.
    long = backend.open_request(200)
    assert torch.equal(backend.prefill([(long, tokens(20, 2))])[0], logits_of(tokens(20, 2)))
    backend.close_request(third)
    backend.release()


def test_logits_of_a_run_that_is_over_are_refused() -> None:
    backend, _ = make()
    request, other = backend.open_request(90), backend.open_request(5)
    rows = backend.prompt_logits(request, tokens(80, 1))
    next(rows)
    backend.prefill([(other, [1])])
    with pytest.raises(FutError, match="another prompt was read"):
        next(rows)


def test_states_of_scales() -> None:
    initial = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    widths = {"qkv": 10, "o": 20, "gate_up": 10, "down": 30}
    states = ActivationState(initial, 1.5, "request", 3)
    assert states.states == 3 and states.scale.shape == (2, 4, 3)
    states.scale[..., 1] = 9
    states.count(7, 1)
    report = states.report(widths)
    assert report["scale"] == [[9.0] * 4] * 2 and report["initial_scale"] == initial.tolist()
    assert report["elements"] == [[70, 140, 70, 210]] * 2
    states.begin_request(1)
    assert torch.equal(states.scale[..., 1], initial)
    for mode in ("delayed", "frozen"):
        shared = ActivationState(initial, 1.5, mode, 3)
        shared.scale[..., 0] = 9
        shared.begin_request(1)
        assert shared.states == 1 and shared.report(widths)["scale"] == [[9.0] * 4] * 2
        assert shared.report(widths)["initial_scale"] == initial.tolist()
    with pytest.raises(UnsupportedError, match="scale_mode is 'never'"):
        ActivationState(initial, 1.0, "never", 3)
