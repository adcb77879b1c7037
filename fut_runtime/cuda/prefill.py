"""Whole prompts through the library: runs of chunks, and the logits that they leave."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from dataclasses import dataclass

from torch import Tensor

from fut_runtime.cuda.decoder import Decoder
from fut_runtime.cuda.library import CudaCallError
from fut_runtime.cuda.structs import PrefillChunks, PrefillConfig, Status
from fut_runtime.errors import UnsupportedError


@dataclass(frozen=True)
class Chunk:
    """Tokens of one request: its slot, the position of the first, and their ids."""

    slot: int
    position: int
    ids: Sequence[int]


class Prefill:
    """Runs over device memory that the configuration names and the caller keeps alive.

    It uses the decoder's cache, page table, embedding and head, and fails with it: see `Decoder`.
    """

    def __init__(self, config: PrefillConfig, decoder: Decoder) -> None:
        """Create a prefill; the configuration has its workspace already.

        Raises:
            UnsupportedError: the library refuses the configuration.
            CudaCallError: CUDA fails.
        """
        self.max_rows, self.max_requests = int(config.max_rows), int(config.max_requests)
        self.history_pages = int(config.history_pages)
        self._decoder, self._config = decoder, config
        self._handle = c_void_p()
        #: Counts runs: logits of a run are there until the next.
        self.runs = 0
        try:
            decoder.call("fut_prefill_create", ctypes.byref(config), decoder.handle, ctypes.byref(self._handle))
        except CudaCallError as error:
            if error.status is Status.INVALID:
                raise UnsupportedError(str(error)) from error
            raise

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Say in which pages of the history the tokens of a slot's request lie."""
        numbers = (c_int32 * len(pages))(*pages)
        self._decoder.call("fut_prefill_set_pages", self._handle, slot, 0, numbers, len(pages), self._decoder.stream())

    def run(
        self,
        chunks: Sequence[Chunk],
        *,
        ended: Sequence[int] = (),
        heads: Sequence[int] = (),
        logits: Tensor | None = None,
    ) -> None:
        """Run a chunk of each of some requests through all layers.

        Args:
            chunks: at most `max_requests`, with at most `max_rows` tokens in all; each slot once.
            ended: slots whose call is over with this run, so that their scales move on.
            heads: indices of the chunks whose last token gets logits, ascending.
            logits: F32 [len(heads), vocab] that these are written to.
        """
        lengths = [len(chunk.ids) for chunk in chunks]
        given = PrefillChunks(
            requests=len(chunks),
            slot=_ints([chunk.slot for chunk in chunks]),
            position=_ints([chunk.position for chunk in chunks]),
            length=_ints(lengths),
            token=_ints([token for chunk in chunks for token in chunk.ids]),
            ended_count=len(ended),
            ended=_ints(ended),
            head_count=len(heads),
            head=_ints(heads),
            logits=None if logits is None else logits.data_ptr(),
        )
        self.runs += 1
        about = f"{len(chunks)} prompts, {sum(lengths)} tokens"
        self._decoder.call("fut_prefill_run", self._handle, ctypes.byref(given), self._decoder.stream(), about=about)

    def logits(self, first: int, out: Tensor) -> None:
        """Logits after rows `first` and on of the last run into F32 [rows, vocab]."""
        self._decoder.call(
            "fut_prefill_logits", self._handle, first, out.shape[0], out.data_ptr(), self._decoder.stream()
        )

    def close(self) -> None:
        """Free the library's side; memory goes with its owners. No other call may follow."""
        if self._handle:
            handle, self._handle = self._handle, c_void_p()
            self._decoder.library.fut_prefill_destroy(handle)


def _ints(numbers: Sequence[int]) -> ctypes.Array[c_int32]:
    return (c_int32 * len(numbers))(*numbers)
