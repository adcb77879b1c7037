"""Processes that work for this one: started with a connection to it, and gone when it is."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

from fut_convert.errors import JobError

#: Seconds that a process has to end by itself, with nothing left to do.
_PATIENCE_S = 5
_PR_SET_PDEATHSIG = 1
#: What a process runs. Its module is imported, so that its classes are the same on both sides.
_PROGRAM = """
import sys
from multiprocessing.connection import Connection
from fut_convert.{module} import serve
serve(Connection(int(sys.argv[1])))
"""


class ChildProcess:
    """A process, and the connection to it.

    Attributes:
        connection: to what the process's `serve` was called with.
    """

    def __init__(self, module: str, title: str, inherited: tuple[int, ...] = ()) -> None:
        """Start a process that calls `serve` of one of this package's modules.

        Args:
            module: its name.
            title: what messages call the process, as the option that asks for it.
            inherited: descriptors that the process holds as long as it lives.

        Raises:
            JobError: the system refuses.
        """
        self._title = title
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM.format(module=module), str(theirs.fileno())],
                    # Started from another place, it finds its packages as this process does.
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    pass_fds=(theirs.fileno(), *inherited),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    # Ctrl-C is for this process, which ends the others.
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise JobError(f"a process of {title} cannot be started ({error.strerror or error})") from error
        self.connection = Connection(ours.detach())

    def send(self, item: object) -> None:
        """Send an object.

        Raises:
            JobError: the process has died.
        """
        try:
            send(self.connection, item)
        except OSError as error:
            raise self.died() from error

    def receive(self) -> Any:
        """Receive an object; an exception that was sent is raised.

        Raises:
            JobError: the process has died.
        """
        try:
            item = receive(self.connection)
        except (EOFError, OSError) as error:
            raise self.died() from error
        if isinstance(item, BaseException):
            raise item
        return item

    def died(self) -> JobError:
        """What to say of the process, which has ended."""
        code = self._process.wait()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        hint = f"; where the system ran out of memory, a smaller {self._title} takes less" if code == -9 else ""
        return JobError(f"a process of {self._title} {how}{hint}; give the same command again")

    def stop(self, *, kill: bool) -> None:
        """Close the connection, at which the process ends, or else is killed: at once where nobody waits for it."""
        self.connection.close()
        if kill:
            self._process.kill()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def send(connection: Connection, item: object) -> None:
    """Send an object, its tensors by value: PyTorch would have `Connection.send` share their memory."""
    connection.send_bytes(pickle.dumps(item))


def receive(connection: Connection) -> Any:
    """Receive what `send` has sent.

    Raises:
        EOFError: the other side has ended.
    """
    return pickle.loads(connection.recv_bytes())


def die_with(parent: int) -> None:
    """Be killed when the process ends that this one works for, however it does: none may write where it has written."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the conversion has ended")
