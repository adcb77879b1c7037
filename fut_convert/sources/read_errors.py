"""What the system says when a file of the checkpoint cannot be read, as an error that names the file and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fut_convert.errors import ReadError


@contextmanager
def read_errors(name: str) -> Iterator[None]:
    """Turn an OSError into a ReadError about the file `name`: a disk that fails, a drive or a share that is gone."""
    try:
        yield
    except OSError as error:
        raise ReadError(
            f"{name}: cannot be read ({error.strerror or error}); see that its disk or share is there and sound, then "
            "give the same command again"
        ) from error
