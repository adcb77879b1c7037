"""The CUDA backend: the engine's interface over the decoder of the library, on a Hopper card."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fut_runtime.artifact.spec import ModelSpec
from fut_runtime.backend import Draw
from fut_runtime.cuda.decoder import Decoder, Row
from fut_runtime.cuda.memory_plan import MAX_ROWS
from fut_runtime.cuda.pages import PageAllocator, Reservation
from fut_runtime.cuda.prefill import Chunk
from fut_runtime.cuda.prompt_path import NO_ACTIVATIONS, PromptPath
from fut_runtime.cuda.structs import PAGE_TOKENS
from fut_runtime.errors import FutError

#: Largest vocabulary that the library chooses tokens from; for larger ones the caller chooses.
MAX_DRAWN_VOCAB = 1 << 18


@dataclass
class _Request:
    reservation: Reservation
    history: Reservation | None  # as long as prompts of this request go through prefill
    length: int = 0


class CudaBackend:
    """A model on a Hopper card.

    Prompts go through prefill until their request decodes; from then on, and where there is no prefill or its history
    has no room for the request, they take the decode path, up to MAX_ROWS tokens a step. A row's numbers do not depend
    on the other rows of its step or run (but for the scales of `delayed`), so prompts and requests share them freely.
    Calls run on PyTorch's current stream of the device; who changes streams between calls orders them.

    Attributes:
        spec: the model's architecture.
        device: the card.
        decode_mode: the weights in use, `int4`, `fp8` or `bf16`.
        prefill_mode: how prompts are read, `e4m3`, `bf16` or `decode`.
        max_context_tokens: most tokens of one request: the model's positions, the planned tokens, or the whole cache.
    """

    def __init__(
        self,
        decoder: Decoder,
        allocator: PageAllocator,
        spec: ModelSpec,
        device: torch.device,
        decode_mode: str,
        max_context_tokens: int,
        memory: Sequence[object],
        prompts: PromptPath | None = None,
    ) -> None:
        """Wrap a decoder; `memory` is what it points to and must live as long.

        Args:
            prompts: prefill beside the decoder; None: prompts take the decode path.
        """
        self.spec, self.device, self.decode_mode = spec, device, decode_mode
        self.max_context_tokens = max_context_tokens
        self._decoder, self._allocator = decoder, allocator
        self.prefill_mode = "decode" if prompts is None else prompts.mode
        self._prompts = prompts
        self._memory = list(memory)
        self._requests: dict[int, _Request] = {}
        self._next = 0
        self._released = False

    def open_request(self, capacity_tokens: int) -> int:
        """Reserve pages for a request of up to `capacity_tokens` tokens; returns its handle.

        Raises:
            CacheFullError: other requests hold the pages or slots that it needs, of the cache or of the history.
            FutError: more tokens than one request may hold.
        """
        if not 1 <= capacity_tokens <= self.max_context_tokens:
            raise FutError(
                f"a request of {capacity_tokens} tokens, expected 1 to {self.max_context_tokens}: the model has "
                f"{self.spec.max_position_embeddings} positions, and the cache {self._allocator.pages * PAGE_TOKENS} "
                "tokens in all"
            )
        reservation = self._allocator.open(capacity_tokens)
        history = None
        try:
            self._decoder.set_pages(reservation.slot, reservation.pages)
            if self._prompts is not None:
                history = self._prompts.open(reservation.slot, capacity_tokens)
        except BaseException:
            self._allocator.close(reservation)
            raise
        handle = self._next
        self._next += 1
        self._requests[handle] = _Request(reservation, history)
        return handle

    def prefill(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Run a chunk of each request's prompt; FP32 logits [requests, vocab] after the last token of each.

        Where this raises, the requests hold what they held before.
        """
        requests = self._checked(chunks)
        logits = torch.empty(len(chunks), self.spec.vocab_size, dtype=torch.float32, device=self.device)
        fast = [i for i, request in enumerate(requests) if request.history is not None]
        slow = [i for i, request in enumerate(requests) if request.history is None]
        if fast and self._prompts is not None:
            found = logits if not slow else torch.empty_like(logits[: len(fast)])
            self._prompts.run([_chunk(requests[i], chunks[i][1]) for i in fast], found)
            if slow:
                logits[fast] = found
        for rows, ends in _steps([requests[i] for i in slow], [chunks[i][1] for i in slow]):
            self._decoder.step(rows, [row for row, _ in ends], chunked=True)
            for (_, chunk), result in zip(ends, self._decoder.logits(len(ends)), strict=True):
                logits[slow[chunk]].copy_(result)
        for request, (_, ids) in zip(requests, chunks, strict=True):
            request.length += len(ids)
        return logits

    def prompt_logits(self, request: int, ids: Sequence[int]) -> Iterator[Tensor]:
        """Append a chunk to a request; FP32 logits [up to MAX_ROWS, vocab] after each of its tokens, step by step.

        Each is good until the next is asked for. The request holds the chunk once all have been taken.
        """
        (held,) = self._checked([(request, ids)])
        if self._prompts is not None and held.history is not None:
            yield from self._prompts.rows(_chunk(held, ids), self.spec.vocab_size, self.device)
            held.length += len(ids)
            return
        for rows, _ in _steps([held], [ids]):
            self._decoder.step(rows, range(len(rows)), chunked=True)
            yield self._decoder.logits(len(rows))
        held.length += len(ids)

    def decode(self, tokens: Sequence[tuple[int, int]]) -> Tensor:
        """Append one token to each request; FP32 logits [requests, vocab]."""
        return self._decode(tokens, None)[1].clone()

    def decode_and_draw(
        self, tokens: Sequence[tuple[int, int]], draws: Sequence[Draw | None]
    ) -> tuple[list[int | None], Tensor]:
        """Append one token to each request, and choose the next one where a draw says how.

        Returns:
            The chosen tokens, None where there is no draw or the logits are not finite; and the logits of all, which
            are good until the next call.
        """
        if len(draws) != len(tokens):
            raise FutError(f"{len(draws)} draws for {len(tokens)} tokens")
        wanted = self.spec.vocab_size <= MAX_DRAWN_VOCAB and any(draw is not None for draw in draws)
        return self._decode(tokens, draws if wanted else None)

    def close_request(self, request: int) -> None:
        """Give a request's pages back; its handle is no longer valid."""
        held = self._request(request)
        self._drop_history(held)
        self._allocator.close(held.reservation)
        del self._requests[request]

    def activation_report(self) -> dict[str, object]:
        """Scales of E4M3 prefill and what has saturated so far; waits for the card. See `ReportsActivations`."""
        return NO_ACTIVATIONS if self._prompts is None else self._prompts.report()

    def release(self) -> None:
        """Wait for the card, then free the model and the cache. Releasing twice is harmless."""
        if not self._released:
            self._released = True
            self._requests.clear()
            try:
                self._decoder.close()
            finally:
                del self._decoder
                self._memory.clear()

    def _decode(
        self, tokens: Sequence[tuple[int, int]], draws: Sequence[Draw | None] | None
    ) -> tuple[list[int | None], Tensor]:
        requests = self._checked([(handle, (token,)) for handle, token in tokens])
        for request in requests:
            self._drop_history(request)
        rows = [
            Row(token, request.length, request.reservation.slot)
            for request, (_, token) in zip(requests, tokens, strict=True)
        ]
        chosen: list[int | None] = []
        logits = []
        for first in range(0, len(rows), MAX_ROWS):
            some = rows[first : first + MAX_ROWS]
            some_draws = None if draws is None else draws[first : first + MAX_ROWS]
            self._decoder.step(some, range(len(some)), some_draws)
            if some_draws is not None:
                found = self._decoder.tokens(len(some))
                chosen += [t if d and t >= 0 else None for t, d in zip(found, some_draws, strict=True)]
            step_logits = self._decoder.logits(len(some))
            # A step writes where the one before did.
            logits.append(step_logits if len(rows) <= MAX_ROWS else step_logits.clone())
        for request in requests:
            request.length += 1
        return chosen or [None] * len(rows), torch.cat(logits) if len(logits) > 1 else logits[0]

    def _checked(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> list[_Request]:
        """The requests that chunks of tokens are about to be appended to; FutError where that cannot be."""
        requests = [self._request(handle) for handle, _ in chunks]
        if not requests or len({id(request) for request in requests}) < len(requests):
            raise FutError("a call takes at least one request, and each once")
        for request, (_, ids) in zip(requests, chunks, strict=True):
            self._check(request, ids)
        return requests

    def _drop_history(self, request: _Request) -> None:
        """End a request's prefill: what follows reads the decode cache."""
        if self._prompts is not None and request.history is not None:
            self._prompts.close(request.history)
            request.history = None

    def _request(self, handle: int) -> _Request:
        try:
            return self._requests[handle]
        except KeyError:
            raise FutError(f"request {handle} is not open") from None

    def _check(self, request: _Request, ids: Sequence[int]) -> None:
        """Tokens that are about to be appended fit the request and are tokens at all; FutError otherwise."""
        if not ids:
            raise FutError("a forward pass needs at least one token")
        capacity, end = request.reservation.capacity_tokens, request.length + len(ids)
        if end > capacity:
            raise FutError(
                f"request holds {request.length} tokens and would need {end}, but was opened for {capacity}: open it "
                "with a larger capacity"
            )
        wrong = next((i for i in ids if not 0 <= i < self.spec.vocab_size), None)
        if wrong is not None:
            raise FutError(f"token id {wrong} is outside the vocabulary of {self.spec.vocab_size}")


def _chunk(request: _Request, ids: Sequence[int]) -> Chunk:
    return Chunk(request.reservation.slot, request.length, ids)


def _steps(
    requests: Sequence[_Request], chunks: Sequence[Sequence[int]]
) -> Iterator[tuple[list[Row], list[tuple[int, int]]]]:
    """Cut chunks into steps of at most MAX_ROWS rows; with each, (row, chunk) of the chunks that end in it."""
    rows: list[Row] = []
    ends: list[tuple[int, int]] = []
    for index, (request, ids) in enumerate(zip(requests, chunks, strict=True)):
        for place, token in enumerate(ids):
            if place == len(ids) - 1:
                ends.append((len(rows), index))
            rows.append(Row(token, request.length + place, request.reservation.slot))
            if len(rows) == MAX_ROWS:
                yield rows, ends
                rows, ends = [], []
    if rows:
        yield rows, ends
