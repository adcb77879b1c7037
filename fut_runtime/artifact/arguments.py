"""What the commands of `fut-artifact` share: their exit codes, and how they name an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fut_runtime.errors import ArtifactError

EXIT_CODES = """
\b
Exit codes:
  0  all is well
  1  the artifact is damaged, or the command failed
  2  wrong usage: unknown option, directory that does not exist
  130, 143  interrupted, terminated; nothing half made is left behind
"""

revision_option = click.option("--revision", metavar="REV", help="Hub only: branch, tag or commit.")


class ArtifactName(click.Path):
    """An existing directory, as a Path, or the id of a repository on the Hub, as it was typed."""

    name = "artifact"

    def __init__(self) -> None:
        super().__init__(exists=True, file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from fut_runtime.resolve import is_hub_id

        if isinstance(value, str) and is_hub_id(value) and not Path(value).exists():
            return value
        return super().convert(value, param, ctx)


def local_artifact(name: Path | str, revision: str | None) -> Path:
    """The directory of an artifact; one that lies on the Hub is fetched first.

    Raises:
        ArtifactError: the Hub does not give it, or a directory was given a revision.
    """
    from fut_runtime.resolve import resolve_artifact

    if isinstance(name, Path):
        if revision is not None:
            raise ArtifactError(f"{name} is a local directory, which has no revision {revision!r}")
        return name
    return resolve_artifact(name, revision)
