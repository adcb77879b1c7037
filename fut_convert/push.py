"""Publishing what was converted: `fut-convert … --push-to-hub`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fut_convert.errors import PublishError, ReportInterrupted
from fut_runtime.command_errors import INTERRUPTED
from fut_runtime.errors import FutError

if TYPE_CHECKING:
    from fut_runtime.hub.upload import Published

_Command = TypeVar("_Command", bound=Callable[..., object])
#: Options that mean nothing without --push-to-hub.
_ABOUT = ("push_private", "push_revision", "push_message")


@dataclass(frozen=True)
class Push:
    """Where an artifact goes on the Hub: `owner/name`, whether private, to which branch and with which message."""

    repo: str
    private: bool = False
    revision: str | None = None
    message: str | None = None

    def check(self) -> None:
        """Check that the Hub would take it, before hours of work.

        Raises:
            FutError: see `fut_runtime.hub.upload.check_upload`.
        """
        from fut_runtime.hub.upload import check_upload

        check_upload(self.repo, private=self.private, revision=self.revision)

    def publish(self, path: Path) -> Published:
        """Upload the sealed artifact `path`.

        Raises:
            PublishError, ReportInterrupted: it is not on the Hub; both say that it is whole, and how to try again.
        """
        from fut_runtime.hub.upload import upload_artifact

        try:
            return upload_artifact(path, self.repo, private=self.private, revision=self.revision, message=self.message)
        except KeyboardInterrupt as error:
            message = f"interrupted; {path.name} is whole, but not published: {self._command(path)} goes on"
            raise ReportInterrupted(message, getattr(error, "exit_code", INTERRUPTED)) from error
        except FutError as error:
            raise PublishError(
                f"{path.name} is whole, but not published: {error} ({self._command(path)} tries again)"
            ) from error

    def _command(self, path: Path) -> str:
        words = ["fut-artifact", "upload", str(path), self.repo]
        words += ["--private"] * self.private
        words += ["--revision", self.revision] if self.revision else []
        words += ["--message", self.message] if self.message else []
        return shlex.join(words)


def push_options(command: _Command) -> _Command:
    """The command-line options of `take_push`."""
    for option in (
        click.option("--push-message", metavar="TEXT", help="Message of the commit on the Hub."),
        click.option("--push-revision", metavar="BRANCH", help="Branch on the Hub, made where there is none."),
        click.option("--push-private", is_flag=True, help="Create a private repository; an existing one must be."),
        click.option("--push-to-hub", metavar="ID", help="Publish the artifact as owner/name, with a model card."),
    ):
        command = option(command)
    return command


def take_push(options: dict[str, Any]) -> Push | None:
    """Take the options of `push_options` out of those given.

    Raises:
        UsageError: one of them without --push-to-hub.
    """
    repo, about = options.pop("push_to_hub"), {name: options.pop(name) for name in _ABOUT}
    if repo is None:
        idle = [name for name, value in about.items() if value]
        if idle:
            raise click.UsageError(f"--{idle[0].replace('_', '-')} says how to publish: give it with --push-to-hub")
        return None
    return Push(repo, about["push_private"], about["push_revision"], about["push_message"])
