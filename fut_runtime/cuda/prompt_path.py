"""Prompts through prefill: pages of the history, calls cut into runs, and the scales between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fut_runtime.cuda.activations import ActivationState
from fut_runtime.cuda.memory_plan import MAX_ROWS
from fut_runtime.cuda.pages import PageAllocator, Reservation
from fut_runtime.cuda.prefill import Chunk, Prefill
from fut_runtime.cuda.structs import PAGE_TOKENS
from fut_runtime.errors import FutError


class PromptPath:
    """Prefill for the requests of a backend, by the slots of their decode cache.

    The BF16 history of a request takes pages of a pool of its own, from the request's beginning to its first decode
    step.

    Attributes:
        mode: `e4m3` or `bf16`.
        capacity_tokens: most tokens of a request that prefill takes.
    """

    def __init__(
        self,
        mode: str,
        prefill: Prefill,
        activations: ActivationState | None,
        slots: int,
        site_widths: Mapping[str, int],
    ) -> None:
        """Wrap a prefill.

        Args:
            activations: the state of its E4M3 activations, None for `bf16`.
            slots: of the decode cache.
            site_widths: elements of a row at each site.
        """
        self.mode = mode
        self.capacity_tokens = prefill.history_pages * PAGE_TOKENS
        self._prefill, self._activations = prefill, activations
        self._history = PageAllocator(prefill.history_pages, slots)
        self._widths = dict(site_widths)

    def open(self, slot: int, capacity_tokens: int) -> Reservation | None:
        """Reserve history for a new request; None where it is too long for the pool.

        Raises:
            CacheFullError: other requests hold the pages that it needs.
        """
        if capacity_tokens > self.capacity_tokens:
            return None
        reservation = self._history.open(capacity_tokens)
        try:
            self._prefill.set_pages(slot, reservation.pages)
        except BaseException:
            self._history.close(reservation)
            raise
        if self._activations is not None:
            self._activations.begin_request(slot)
        return reservation

    def close(self, reservation: Reservation) -> None:
        """Give the history of a request back."""
        self._history.close(reservation)

    def run(self, chunks: Sequence[Chunk], logits: Tensor) -> None:
        """One call: append a chunk to each of some requests; into `logits`, F32 [chunks, vocab], after each chunk."""
        first_head = 0
        for pieces, heads, last in self._runs(chunks):
            end = first_head + len(heads)
            self._run(pieces, chunks if last else (), heads, logits[first_head:end])
            first_head = end

    def rows(self, chunk: Chunk, vocab: int, device: torch.device) -> Iterator[Tensor]:
        """The same for one chunk, with F32 [up to MAX_ROWS, vocab] after each of its tokens, some at a time."""
        buffer = torch.empty(MAX_ROWS, vocab, dtype=torch.float32, device=device)
        for (piece,), _, last in self._runs([chunk]):
            self._run([piece], [chunk] if last else (), (), None)
            run = self._prefill.runs
            for first in range(0, len(piece.ids), MAX_ROWS):
                if self._prefill.runs != run:
                    raise FutError("another prompt was read while the logits of one were being taken: take them first")
                some = buffer[: min(MAX_ROWS, len(piece.ids) - first)]
                self._prefill.logits(first, some)
                yield some

    def report(self) -> dict[str, object]:
        """What `ReportsActivations` says; of `bf16`, that there are no sites."""
        if self._activations is None:
            return NO_ACTIVATIONS
        return self._activations.report(self._widths)

    def release(self) -> None:
        """Free the library's side."""
        self._prefill.close()

    def _run(
        self, pieces: Sequence[Chunk], ended: Sequence[Chunk], heads: Sequence[int], logits: Tensor | None
    ) -> None:
        self._prefill.run(pieces, ended=[chunk.slot for chunk in ended], heads=heads, logits=logits)
        if self._activations is not None:
            self._activations.count(sum(len(piece.ids) for piece in pieces), pieces[-1].slot)

    def _runs(self, chunks: Sequence[Chunk]) -> Iterator[tuple[list[Chunk], list[int], bool]]:
        """Cut a call into runs: its pieces of chunks, which of them end their chunk, and whether it is the last."""
        most_rows, most_requests = self._prefill.max_rows, self._prefill.max_requests
        pieces: list[Chunk] = []
        heads: list[int] = []
        rows = 0
        for index, chunk in enumerate(chunks):
            done = 0
            while done < len(chunk.ids):
                take = min(len(chunk.ids) - done, most_rows - rows)
                pieces.append(Chunk(chunk.slot, chunk.position + done, chunk.ids[done : done + take]))
                rows += take
                done += take
                if done == len(chunk.ids):
                    heads.append(len(pieces) - 1)
                over = done == len(chunk.ids) and index == len(chunks) - 1
                if rows == most_rows or len(pieces) == most_requests or over:
                    yield pieces, heads, over
                    pieces, heads, rows = [], [], 0


#: The report of a backend without E4M3 activations.
NO_ACTIVATIONS: dict[str, object] = {
    "scale_mode": "none", "sites": [], "initial_scale": [], "scale": [], "saturated": [], "elements": [],
    "ignored_maxima": 0,
}  # fmt: skip
