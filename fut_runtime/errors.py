"""The exceptions that `fut_runtime` raises for a user's mistake or a broken file."""

from __future__ import annotations


class FutError(Exception):
    """Base of every error this package raises on purpose.

    The message names the file, the tensor, what was found, what was expected and the remedy.
    Command-line programs print it without a traceback.
    """


class ArtifactError(FutError):
    """An artifact is missing, not sealed, damaged, or of a format this version cannot read."""


class UnsupportedError(FutError):
    """The request is well formed, but this version, backend or card does not support it."""
