"""Layers converted side by side, by processes of their own: `fut-convert --jobs`.

Threads share Python's lock, and beyond some cores wait for it. What the processes write is what this one would have
written: a block of rows depends on nothing but its weights and the calibration's means.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import TracebackType

from fut_convert.child_process import ChildProcess
from fut_convert.job_process import JobSetup, LayerDone
from fut_convert.module_conversion import LayerWork


class LayerJobs:
    """Processes that convert a layer each at a time."""

    def __init__(
        self, count: int, setup: JobSetup, inherited: tuple[int, ...], on_done: Callable[[LayerWork, LayerDone], None]
    ) -> None:
        """Start the processes.

        Args:
            count: how many.
            setup: what each needs to know.
            inherited: descriptors that they hold as long as they live: the lock of what they write to.
            on_done: called in this thread, by `submit` and `drain`, for each layer that is done.

        Raises:
            JobError: the system refuses one.
        """
        self._on_done = on_done
        self._processes: dict[Connection, ChildProcess] = {}
        self._busy: dict[Connection, LayerWork] = {}
        self._peaks: dict[Connection, int] = {}
        try:
            for _ in range(count):
                process = ChildProcess("job_process", "--jobs", inherited)
                self._processes[process.connection] = process
                process.send(setup)
        except BaseException:
            self._stop()
            raise

    @property
    def peak_bytes(self) -> int:
        """Most memory of each process so far, added up."""
        return sum(self._peaks.values())

    def submit(self, work: LayerWork) -> None:
        """Have a layer converted, as soon as a process has nothing else to do.

        Raises:
            FutError: what went wrong with a layer before it; JobError where a process died.
        """
        while len(self._busy) == len(self._processes):
            self._receive()
        free = next(connection for connection in self._processes if connection not in self._busy)
        self._processes[free].send(work)
        self._busy[free] = work

    def drain(self) -> None:
        """Wait until every layer is done; raises as `submit`."""
        while self._busy:
            self._receive()

    def __enter__(self) -> LayerJobs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _receive(self) -> None:
        for ready in wait(list(self._busy)):
            assert isinstance(ready, Connection)
            done = self._processes[ready].receive()
            self._peaks[ready] = done.peak_bytes
            self._on_done(self._busy.pop(ready), done)

    def _stop(self) -> None:
        """End the processes; those that still work at a layer at once, for nobody waits for it."""
        for connection, process in self._processes.items():
            process.stop(kill=connection in self._busy)
