"""Layers converted side by side, by processes of their own: `fut-convert --jobs`.

Threads share Python's lock, and beyond some cores wait for it. What the processes write is what this one would have
written: a block of rows depends on nothing but its weights and the calibration's means.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import TracebackType

from fut_convert.errors import JobError
from fut_convert.job_process import JobSetup, LayerDone, receive, send
from fut_convert.module_conversion import LayerWork

#: What a process runs. Its module is imported, so that its classes are the same on both sides.
_PROGRAM = """
import sys
from multiprocessing.connection import Connection
from fut_convert.job_process import serve
serve(Connection(int(sys.argv[1])))
"""
#: Seconds that a process has to end by itself, with nothing left to do.
_PATIENCE_S = 5


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
        """
        self._on_done = on_done
        self._processes: dict[Connection, subprocess.Popen[bytes]] = {}
        self._busy: dict[Connection, LayerWork] = {}
        self._peaks: dict[Connection, int] = {}
        try:
            for _ in range(count):
                connection = self._start(inherited)
                send(connection, setup)
        except OSError as error:
            self._stop()
            raise JobError(f"a process of --jobs cannot be started ({error.strerror or error})") from error
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
        try:
            send(free, work)
        except OSError as error:
            raise self._died(free) from error
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

    def _start(self, inherited: tuple[int, ...]) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
                # Started from another place, it finds its packages as this process does.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=(theirs.fileno(), *inherited),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # Ctrl-C is for this process, which ends the others.
                start_new_session=True,
            )
        connection = Connection(ours.detach())
        self._processes[connection] = process
        return connection

    def _receive(self) -> None:
        for ready in wait(list(self._busy)):
            assert isinstance(ready, Connection)
            try:
                answer = receive(ready)
            except (EOFError, OSError) as error:
                raise self._died(ready) from error
            work = self._busy.pop(ready)
            if isinstance(answer, BaseException):
                raise answer
            self._peaks[ready] = answer.peak_bytes
            self._on_done(work, answer)

    def _died(self, connection: Connection) -> JobError:
        code = self._processes[connection].wait()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        hint = "; where the system ran out of memory, fewer --jobs take less" if code == -9 else ""
        return JobError(f"a process of --jobs {how}{hint}; give the same command again")

    def _stop(self) -> None:
        """End the processes; those that still work at a layer at once, for nobody waits for it."""
        for connection, process in self._processes.items():
            connection.close()
            if connection in self._busy:
                process.kill()
        for process in self._processes.values():
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
