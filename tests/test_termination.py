"""SIGTERM and SIGHUP as exceptions: once, and only where they would have ended the process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from fut_runtime.termination import Terminated, terminable


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """The handlers of a program that was started in the foreground, however the tests were."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_only_the_first_signal_raises(number: int, exit_code: int) -> None:
    cleaned = False
    with pytest.raises(Terminated) as caught, terminable():
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGHUP)
            cleaned = True
    assert cleaned and caught.value.exit_code == exit_code
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with terminable():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_other_threads_may_convert_too() -> None:
    done = []

    def work() -> None:
        with terminable():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
