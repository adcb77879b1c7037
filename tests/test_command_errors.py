"""What the programs make of errors."""

from __future__ import annotations

import errno

import click
import pytest

from fut_runtime.command_errors import INTERRUPTED, reported_errors
from fut_runtime.errors import FutError


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FutError("no such thing"), "no such thing"),
        (PermissionError(errno.EACCES, "Permission denied", "x.txt"), "x.txt: Permission denied"),
        (MemoryError(), "out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 12 bytes"), "out of memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory"),
    ],
)
def test_a_users_mistake_becomes_a_message(error: Exception, message: str) -> None:
    with pytest.raises(click.ClickException, match=message) as caught, reported_errors():
        raise error
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyError("a bug"), BrokenPipeError(errno.EPIPE, "gone")])
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error)), reported_errors():
        raise error


def test_an_interrupt_has_its_own_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, reported_errors("stopped"):
        raise KeyboardInterrupt
    assert caught.value.code == INTERRUPTED
    assert capsys.readouterr().err == "stopped\n"
