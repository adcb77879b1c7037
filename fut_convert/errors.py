"""The exceptions that `fut_convert` raises for a user's mistake, a broken file or an unsupported model."""

from __future__ import annotations

import fut_runtime.errors
from fut_runtime.errors import FutError


class ConvertError(FutError):
    """Base of every error this package raises on purpose; command-line programs print it without a traceback."""


class UnsupportedModelError(ConvertError):
    """The checkpoint is well formed, but its architecture or one of its settings cannot be converted."""


class CheckpointError(ConvertError):
    """A checkpoint is incomplete, damaged, unsafe to read, or contradicts its own config."""


class ReadError(CheckpointError):
    """A file of the checkpoint cannot be read, or not any more: its disk, drive or network is at fault.

    What it holds is not, so a later run may succeed, and goes on with what this one has done.
    """


class HubError(ConvertError, fut_runtime.errors.HubError):
    """A model could not be fetched from the Hub: unknown, gated, offline or out of reach."""


class PartsError(HubError):
    """The Hub, or what stands in its place, gives files as a whole only, where a part of one was asked for."""


class JobError(ConvertError):
    """One of several processes that convert side by side died."""


#: What a later run may not meet again, so that what is done is worth keeping.
PASSING_ERRORS = (ReadError, HubError, JobError)


class RecipeError(ConvertError):
    """A recipe or an option is unknown, of the wrong type, or contradicts another."""


class ReportError(ConvertError):
    """The artifact is whole, but what was to be measured on it could not be."""


class PublishError(ConvertError):
    """The artifact is whole, but the Hub did not take it."""


class ReportInterrupted(KeyboardInterrupt):
    """An interrupt while the report was made or the artifact uploaded, when it is whole already.

    Attributes:
        message: says so.
        exit_code: as of the interrupt itself.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


class PreflightError(ConvertError):
    """The plan shows that the conversion cannot succeed: problems in the checkpoint, too little disk or memory."""
