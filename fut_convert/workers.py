"""Threads that share the row blocks of a matrix: each reads, quantizes and writes a block at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import torch

#: More threads than this wait for Python's lock and for the disk rather than compute.
_MOST_THREADS = 16

Item = TypeVar("Item")
Result = TypeVar("Result")


def worker_count(device: torch.device) -> int:
    """Threads a conversion uses: one more than PyTorch may, so that one can wait for the disk; on a GPU one."""
    return min(torch.get_num_threads(), _MOST_THREADS) + 1 if device.type == "cpu" else 1


class Workers:
    """A pool of threads in which PyTorch runs single-threaded.

    A block fits in a core's cache, and its operations are too short to be worth sharing: on a busy machine the barriers
    of OpenMP cost several times what they save.
    """

    def __init__(self, count: int) -> None:
        """Start `count` threads; with one, everything runs in the calling thread, with all of PyTorch's threads."""
        self._pool: ThreadPoolExecutor | None = None
        if count == 1:
            return
        threads = torch.get_num_threads()
        everyone = threading.Barrier(count)
        self._pool = ThreadPoolExecutor(count, "fut-convert", _one_thread)
        # Each waits for all, so that all start now. The setting is partly global, hence set back for this thread.
        try:
            list(self._pool.map(lambda _: everyone.wait(), range(count)))
        except BaseException:
            # An interrupt here would leave threads waiting for others that never start, and the process with them.
            everyone.abort()
            self._pool.shutdown(cancel_futures=True)
            raise
        torch.set_num_threads(threads)

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Results in the order of the items; the first error is raised, and what has not begun is dropped."""
        if self._pool is None:
            return [function(item) for item in items]
        return list(self._pool.map(function, items))

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _one_thread() -> None:
    """Make PyTorch single-threaded in the calling thread."""
    # Asked for its threads first, a thread takes over the global number, which it would otherwise do later, over ours.
    torch.get_num_threads()
    torch.set_num_threads(1)
