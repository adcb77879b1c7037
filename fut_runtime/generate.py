"""The token loop: requests join, are prefilled in chunks, decode together, and leave when they are finished."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import TracebackType

from torch import Tensor

from fut_runtime.backend import Backend, DrawsTokens
from fut_runtime.errors import CacheFullError, FutError
from fut_runtime.request import KeptCache, Request
from fut_runtime.results import Completion, TokenEvent
from fut_runtime.sampling import SamplingError, SamplingParams
from fut_runtime.tokenizer import Tokenizer

#: Tokens of prompts that one prefill call takes.
DEFAULT_PREFILL_CHUNK = 1024
#: Requests that hold a KV cache at once; others wait.
DEFAULT_MAX_BATCH = 16


class PromptError(FutError):
    """A prompt is empty, too long for the model, or holds ids the model does not have."""


class GenerationBatch:
    """Requests that generate together. One may be added or cancelled between any two steps.

    What a request gets does not depend on the others: its prompt is always cut into the same chunks, and its draws come
    from its own generator. So greedy output is the same alone and in company, as long as the backend keeps its word.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer | None,
        *,
        eos_ids: frozenset[int],
        prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
        max_batch: int = DEFAULT_MAX_BATCH,
    ) -> None:
        """Begin with no requests.

        Args:
            backend: a loaded model.
            tokenizer: turns tokens into text; without one the texts of events and completions are empty.
            eos_ids: tokens that end a text.
            prefill_chunk: prompts longer than this are prefilled in chunks of it, between decode steps.
            max_batch: most requests that are open in the backend at once.

        Raises:
            FutError: a size is not positive.
        """
        if prefill_chunk < 1 or max_batch < 1:
            raise FutError(f"prefill_chunk is {prefill_chunk} and max_batch {max_batch}, expected at least 1")
        self._backend = backend
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._prefill_chunk = prefill_chunk
        self._max_batch = max_batch
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []
        self._added = 0

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        continues: bool = True,
        cache: KeptCache | None = None,
    ) -> int:
        """Submit a prompt; returns its index, which its events carry.

        Args:
            continues: the output continues the prompt's text (a raw prompt), rather than beginning one (a chat turn).
            cache: a kept cache to use where it covers a beginning of the prompt, and to leave behind at the end.

        Raises:
            PromptError: the prompt is empty, leaves no room for a token, or has ids outside the vocabulary.
        """
        context, vocab = self._backend.max_context_tokens, self._backend.spec.vocab_size
        if not prompt_ids:
            raise PromptError("the prompt is empty: there is no token to start from")
        if len(prompt_ids) >= context:
            raise PromptError(
                f"the prompt has {len(prompt_ids)} tokens; the model's context is {context} tokens, prompt and output "
                "together: shorten the prompt"
            )
        wrong = next((i for i in prompt_ids if not 0 <= i < vocab), None)
        if wrong is not None:
            raise PromptError(f"the prompt holds token id {wrong}; the model has ids 0 to {vocab - 1}")
        request = Request(
            self._added,
            prompt_ids,
            params,
            limit=context - len(prompt_ids),
            tokenizer=self._tokenizer,
            eos_ids=self._eos_ids,
            continues=continues,
            cache=cache,
        )
        self._waiting.append(request)
        self._added += 1
        return request.index

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + len(self._active)

    def step(self) -> list[TokenEvent]:
        """One prefill call for prompts that are not read yet, then one decode call for requests that were."""
        self._admit()
        running = [r for r in self._active if r.prefilled]
        events = self._prefill_step()
        if running:
            tokens, logits = self._decode(running)
            for request, token, row in zip(running, tokens, logits, strict=True):
                request.fed += 1
                events.append(self._advance(request, row, token))
        return events

    def cancel(self, index: int) -> Completion | None:
        """Take a request out; returns what it has generated, or None where no such request is unfinished."""
        request = next((r for r in (*self._active, *self._waiting) if r.index == index), None)
        if request is None:
            return None
        if request in self._active:
            self._active.remove(request)
        else:
            self._waiting.remove(request)
        if request.handle is not None:
            self._backend.close_request(request.handle)
        return request.completion()

    def close(self) -> None:
        """Cancel whatever is unfinished and free its caches."""
        for request in (*self._active, *self._waiting):
            self.cancel(request.index)

    def __enter__(self) -> GenerationBatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _admit(self) -> None:
        """Open waiting requests, first come first served, as long as the backend has room for them."""
        while self._waiting and len(self._active) < self._max_batch:
            try:
                self._open(self._waiting[0])
            except CacheFullError:
                if not self._active:  # nobody here will ever make room
                    raise
                return
            self._active.append(self._waiting.popleft())

    def _decode(self, running: Sequence[Request]) -> tuple[Sequence[int | None], Tensor]:
        """Append each request's last token; next tokens, where the backend has chosen one, and all logits."""
        appended = [(_handle(r), r.output_ids[-1]) for r in running]
        if isinstance(self._backend, DrawsTokens):
            draws = [request.draw() for request in running]
            if any(draw is not None for draw in draws):
                return self._backend.decode_and_draw(appended, draws)
        return [None] * len(running), self._backend.decode(appended)

    def _open(self, request: Request) -> None:
        """Give a request its cache: the kept one where it covers the prompt's beginning, else a new one."""
        cache = request.cache
        if cache is not None and cache.covers(request.prompt_ids, request.capacity):
            request.handle, cache.handle = cache.handle, None
            request.fed = request.cached_tokens = len(cache.tokens)
            return
        capacity = request.capacity
        if cache is not None:
            if cache.handle is not None:
                self._backend.close_request(cache.handle)
                cache.handle = None
            # Room for as much again, so that a conversation is not read anew at every turn.
            cache.capacity = capacity = min(2 * capacity, self._backend.max_context_tokens)
        request.handle = self._backend.open_request(capacity)

    def _prefill_step(self) -> list[TokenEvent]:
        """Prefill the next chunks, first come first served, as many as one call takes.

        A chunk is never cut to fit: where a request's chunks lie must not depend on its company, because E4M3 scales
        and sums do depend on it.
        """
        chunks: list[tuple[Request, list[int]]] = []
        room = self._prefill_chunk
        for request in self._active:
            chunk = request.prompt_ids[request.fed : request.fed + self._prefill_chunk]
            if chunk and len(chunk) <= room:
                chunks.append((request, chunk))
                room -= len(chunk)
        if not chunks:
            return []
        logits = self._backend.prefill([(_handle(r), chunk) for r, chunk in chunks])
        events = []
        for (request, chunk), row in zip(chunks, logits, strict=True):
            request.fed += len(chunk)
            if request.prefilled:
                events.append(self._advance(request, row))
        return events

    def _advance(self, request: Request, logits: Tensor, token: int | None = None) -> TokenEvent:
        """Go on with a token that the backend has chosen, or choose one from the logits."""
        try:
            event = request.advance(logits, token)
        except SamplingError as error:
            raise SamplingError(f"prompt {request.index}, token {request.fed}: {error}") from error
        if event.completion is not None:
            self._active.remove(request)
            if request.cache is not None:
                request.cache.handle = request.handle
                request.cache.tokens = request.token_ids[: request.fed]
            else:
                self._backend.close_request(_handle(request))
        return event


def _handle(request: Request) -> int:
    """The backend's handle of a request that has been opened."""
    if request.handle is None:
        raise FutError(f"request {request.index} has not been opened")
    return request.handle
