"""The exceptions that `fut_runtime` raises for a user's mistake or a broken file."""

from __future__ import annotations


class FutError(Exception):
    """Base of every error this package raises on purpose.

    The message names the file, the tensor, what was found, what was expected and the remedy.
    Command-line programs print it without a traceback.
    """


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: Python's own, PyTorch's on a CPU, or that of a CUDA device."""
    return isinstance(error, MemoryError) or any(
        text in str(error) for text in ("out of memory", "can't allocate memory")
    )


class ArtifactError(FutError):
    """An artifact is missing, not sealed, damaged, or of a format this version cannot read."""


class HubError(ArtifactError):
    """The Hub does not give or take a repository: unknown, gated, no right to it, offline or out of reach."""


class UnsupportedError(FutError):
    """The request is well formed, but this version, backend or card does not support it."""


class DeviceMemoryError(FutError):
    """A device has too little free memory; the message says how much is needed, for what, and how much is free."""


class CacheFullError(FutError):
    """Other requests hold the memory that a new one needs; it may be opened once some of them are closed."""
