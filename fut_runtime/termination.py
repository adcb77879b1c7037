"""SIGTERM and a closed terminal end a program as Ctrl-C does, so that it takes away what it has half made."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """The system, or somebody, asked the process to end. `exit_code` is what a shell reports for the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` in the main thread where SIGTERM or SIGHUP would end the process on the spot.

    Only the first signal raises: the cleaning up that follows is short, and must not be cut short in its turn. A signal
    that is ignored (`nohup`) or handled otherwise stays as it is. Does nothing outside the main thread.
    """
    ours = threading.current_thread() is threading.main_thread()
    taken = [number for number in _SIGNALS if ours and signal.getsignal(number) is signal.SIG_DFL]

    def terminate(number: int, _: FrameType | None) -> None:
        for other in taken:
            signal.signal(other, signal.SIG_IGN)
        raise Terminated(number)

    for number in taken:
        signal.signal(number, terminate)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
