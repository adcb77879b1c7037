"""Limits of time and memory for one call, and what counts as breaking them."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: The files are smaller than a megabyte; reading one takes milliseconds. Seconds of the processor, so that other work
#: on the machine does not count; who waits for something else is given longer.
SECONDS = 10
_WAITING = 6
#: Address space above what the process has already.
MEMORY_BYTES = 1 << 30


class TooSlowError(BaseException):
    """A call took longer than its limit. No reader that catches `Exception` can take it for a damaged file."""


@contextmanager
def limited(seconds: int, memory_bytes: int) -> Iterator[None]:
    """Let what runs inside fail with TooSlowError or MemoryError (PyTorch: RuntimeError) where it passes a limit."""

    def stop(signum: int, frame: object) -> None:
        raise TooSlowError(f"took longer than {seconds} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    previous = {number: signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGPROF)}
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + memory_bytes, hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(_WAITING * seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for number, handler in previous.items():
            signal.signal(number, handler)


def foreign_error(
    read: Callable[[], object],
    own: type[BaseException],
    memory_bytes: int = MEMORY_BYTES,
    seconds: int = SECONDS,
) -> BaseException | None:
    """What a reader raises that is not its own error, limits included; None where it raises nothing else."""
    try:
        with limited(seconds, memory_bytes):
            read()
    except own as error:
        # A message that no terminal or log file takes is no message.
        try:
            str(error).encode()
        except UnicodeEncodeError as broken:
            return broken
        return None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return error
    return None


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
