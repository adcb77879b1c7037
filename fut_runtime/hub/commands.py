"""`fut-artifact card` and `fut-artifact upload`: the page of an artifact on the Hub, and the way there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fut_runtime.artifact.arguments import EXIT_CODES, ArtifactName, local_artifact, revision_option
from fut_runtime.artifact.paths import CARD_FILE
from fut_runtime.errors import ArtifactError
from fut_runtime.streams import for_terminal

if TYPE_CHECKING:
    from fut_runtime.hub.contents import UploadContents
    from fut_runtime.hub.upload import Published

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
        click.echo(f"note: {for_terminal(note)}", err=True)
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


@click.command("upload", epilog=EXIT_CODES)
@click.argument("artifact", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("repo")
@click.option("--private", is_flag=True, help="Create a private repository; an existing one must be private.")
@click.option("--revision", metavar="BRANCH", help="Branch, made where there is none. [default: main]")
@click.option("--message", metavar="TEXT", help="Message of the commit.")
@card_options
@click.option("--no-card", is_flag=True, help="Upload no model card; one that is there stays as it is.")
@click.option("--no-verify", is_flag=True, help="Do not read and check the artifact first.")
@click.option("--dry-run", is_flag=True, help="List what would go where, ask nobody, and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to standard output, and nothing else.")
def upload_command(
    artifact: Path, repo: str, private: bool, revision: str | None, message: str | None, base_model: str | None,
    license: str | None, bench: Path | None, no_card: bool, no_verify: bool, dry_run: bool, as_json: bool,
) -> None:  # fmt: skip
    """Publish ARTIFACT, a directory, on the Hub as REPO (owner/name), in one commit.

    The sealed files, the report and a model card go; nothing else does. The artifact is verified first. Interrupted,
    the same command goes on with the large files that have not arrived, and nobody sees half of it. The access token is
    that of HF_TOKEN or of `hf auth login`.

    \b
    Examples:
      fut-artifact upload my-artifact me/my-model --private
      fut-artifact upload my-artifact me/my-model --revision v2 --message 'GPTQ'
      fut-artifact upload my-artifact me/my-model --dry-run
    """
    from fut_runtime.artifact.reader import Artifact
    from fut_runtime.artifact.report import ByteProgress
    from fut_runtime.artifact.verify import sealed_bytes
    from fut_runtime.hub.contents import upload_contents
    from fut_runtime.hub.upload import upload_artifact

    about: dict[str, Any] = {"card": not no_card, "base_model": base_model, "license": license, "bench": bench}
    if dry_run:
        contents = upload_contents(Artifact.open(artifact), repo, **about)
        print_contents(contents, repo, revision, as_json=as_json)
        return
    quiet_progress(as_json)
    with ByteProgress("verifying", sealed_bytes(artifact)) as progress:
        try:
            published = upload_artifact(
                artifact, repo, private=private, revision=revision, message=message, verify=not no_verify,
                progress=progress.advance, on_verified=progress.stop, **about,
            )  # fmt: skip
        except KeyboardInterrupt as error:
            error.message = INTERRUPTED_UPLOAD  # type: ignore[attr-defined]
            raise
    if as_json:
        click.echo(json.dumps(published.to_dict()))
    else:
        print_published(published)


#: What Ctrl-C says.
INTERRUPTED_UPLOAD = "interrupted; nothing is published yet, and the same command goes on with what has not arrived"


def quiet_progress(quiet: bool) -> None:
    """Turn the Hub's own progress bars off where nobody watches."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if quiet or not sys.stderr.isatty():
        disable_progress_bars()


def print_contents(contents: UploadContents, repo: str, revision: str | None, *, as_json: bool) -> None:
    """Print what an upload would consist of."""
    from huggingface_hub import constants

    from fut_runtime.artifact.json_text import shown
    from fut_runtime.artifact.report import size_text
    from fut_runtime.hub.failures import Repository

    url, branch = Repository(repo).page, revision or constants.DEFAULT_REVISION
    if as_json:
        files = [{"name": file.name, "bytes": file.size} for file in contents.files]
        found = {"repo": repo, "url": url, "revision": branch, "files": files, "bytes": contents.nbytes}
        click.echo(json.dumps({**found, "staying": list(contents.staying), "notes": list(contents.notes)}))
        return
    click.echo(f"to {url}, branch {branch}:")
    for file in contents.files:
        click.echo(f"{size_text(file.size):>12}  {shown(file.name)}")
    click.echo(f"{len(contents.files)} files, {size_text(contents.nbytes)}")
    if contents.staying:
        click.echo(f"stays here: {', '.join(map(shown, contents.staying))}")
    for note in contents.notes:
        click.echo(f"note: {for_terminal(note)}", err=True)


def print_published(published: Published) -> None:
    """Print where an artifact is now."""
    from fut_runtime.artifact.report import size_text

    for note in published.notes:
        click.echo(f"note: {for_terminal(note)}", err=True)
    what = f"{published.files} files, {size_text(published.bytes)}"
    how = "published" if published.changed else "unchanged"
    click.echo(f"{how}: {published.url}, branch {published.revision}, commit {published.commit[:12]} ({what})")
