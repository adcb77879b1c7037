"""`fut-artifact card`: the page of an artifact on the Hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from fut_runtime.artifact.arguments import EXIT_CODES, ArtifactName, local_artifact, revision_option
from fut_runtime.artifact.paths import CARD_FILE
from fut_runtime.errors import ArtifactError

_Command = TypeVar("_Command", bound=Callable[..., object])


def card_options(command: _Command) -> _Command:
    """Options that say what a card cannot know from the artifact."""
    for option in (
        click.option(
            "--bench",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="Table of what fut-run bench decode --json wrote. [default: bench.jsonl beside the sealed files]",
        ),
        click.option("--license", metavar="ID", help="Licence, where the source's card does not name it."),
        click.option("--base-model", metavar="ID", help="Hub id of the source, where it was converted from files."),
    ):
        command = option(command)
    return command


@click.command("card", epilog=EXIT_CODES)
@click.argument("artifact", type=ArtifactName())
@click.option("--repo", metavar="ID", help="Hub id that the card's examples name. [default: ARTIFACT's name]")
@card_options
@click.option("--write", is_flag=True, help="Write README.md beside the sealed files, to be edited and then uploaded.")
@click.option("--overwrite", is_flag=True, help="With --write: replace a README.md.")
@revision_option
def card_command(
    artifact: Path | str, repo: str | None, base_model: str | None, license: str | None, bench: Path | None,
    write: bool, overwrite: bool, revision: str | None,
) -> None:  # fmt: skip
    """Print the model card of ARTIFACT, a directory or a Hub id.

    It says what the artifact was made from and how, how to run it, and what quality and speed were measured; licence
    and languages are those of the source's card. upload makes the same one, unless a README.md lies beside the sealed
    files: then that is the card.
    """
    from fut_runtime.artifact.reader import Artifact
    from fut_runtime.artifact.staging import write_file
    from fut_runtime.hub.card import model_card

    path = local_artifact(artifact, revision)
    opened = Artifact.open(path)
    named = repo or (artifact if isinstance(artifact, str) else None)
    card = model_card(opened, named, base_model=base_model, license=license, bench=bench)
    for note in card.notes:
        click.echo(f"note: {note}", err=True)
    if not write:
        click.echo(card.text, nl=False)
        return
    target = path / CARD_FILE
    if not isinstance(artifact, Path):
        raise ArtifactError(f"{artifact}: lies in the Hub's cache, which is not written to; leave out --write")
    if CARD_FILE in opened.files:
        raise ArtifactError(
            f"{target}: is the source's card, sealed; fut-artifact repack {artifact} OUT makes room for another"
        )
    if target.exists() and not overwrite:
        raise ArtifactError(f"{target}: exists already; replace it with --overwrite, or leave out --write to look")
    write_file(target, card.text.encode())
    click.echo(f"wrote {target}")
