"""What the programs do with an error: one message and an exit code, never a traceback for a user's mistake."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator

import click

from fut_runtime.errors import FutError, is_out_of_memory
from fut_runtime.streams import for_terminal

#: Exit code of a program that Ctrl-C ended, as shells report it.
INTERRUPTED = 130


@contextlib.contextmanager
def reported_errors(interrupted: str = "interrupted", out_of_memory: str = "out of memory") -> Iterator[None]:
    """Turn what goes wrong on purpose, in the file system or for want of memory into click's message and exit code 1.

    An interrupt prints `interrupted`, or its own `message`, and exits with 130, or with its own `exit_code`: that of
    the signal that ended the process.
    """
    try:
        yield
    except FutError as error:
        raise click.ClickException(for_terminal(str(error))) from error
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader has left, as `head` does; click knows how to leave quietly
            raise
        message = f"{error.filename or 'input or output'}: {error.strerror or error}"
        raise click.ClickException(for_terminal(message)) from error
    except KeyboardInterrupt as error:
        click.echo(for_terminal(getattr(error, "message", interrupted)), err=True)
        sys.exit(getattr(error, "exit_code", INTERRUPTED))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise click.ClickException(f"{out_of_memory} ({error or 'no more from the system'})") from error
