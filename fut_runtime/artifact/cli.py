"""`fut-artifact`: look at an artifact, check it, turn it back into a checkpoint, repack it, publish it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fut_runtime.artifact.arguments import EXIT_CODES, ArtifactName, local_artifact, revision_option
from fut_runtime.artifact.orders import DEFAULT_NIBBLE_ORDER, NIBBLE_ORDERS
from fut_runtime.command_errors import reported_errors
from fut_runtime.errors import ArtifactError
from fut_runtime.hub.commands import card_command, upload_command
from fut_runtime.streams import prepare_streams
from fut_runtime.termination import terminable

if TYPE_CHECKING:
    from fut_runtime.artifact.reader import Artifact


class _Commands(click.Group):
    """Prints a user's mistake as one message instead of a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        prepare_streams()
        with reported_errors(), terminable():
            result: object = super().invoke(ctx)
        return result


#: A directory that a command makes.
_OUT = click.Path(file_okay=False, path_type=Path)


@click.group(cls=_Commands, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="futransformer", prog_name="fut-artifact")
def main() -> None:
    """Work with artifacts: the directories that fut-convert writes and fut-run reads.

    An artifact holds a model's weights packed for Hopper GPUs, its tokenizer, and the hash of every byte. It is an
    artifact only when it is sealed: a conversion or download that was interrupted is refused by every command here.
    ARTIFACT is a directory or the id of a repository on the Hub (owner/name), which is fetched into the Hub's cache.
    """


main.add_command(card_command)
main.add_command(upload_command)


@main.command("inspect", epilog=EXIT_CODES)
@click.argument("artifact", type=ArtifactName())
@click.option("--all", "every", is_flag=True, help="One line a tensor, instead of one for all layers that are alike.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object, for programs.")
@revision_option
def inspect_command(artifact: Path | str, every: bool, as_json: bool, revision: str | None) -> None:
    """Show what ARTIFACT holds: model, source, tensors, bytes, bits per weight.

    Bits per weight count scales and padding, divided by the weights the model really has. Nothing but headers is read;
    use verify to check the data.
    """
    from fut_runtime.artifact.inspect import summary
    from fut_runtime.artifact.reader import Artifact
    from fut_runtime.artifact.report import print_summary

    opened = Artifact.open(local_artifact(artifact, revision))
    if as_json:
        click.echo(json.dumps(summary(opened), indent=2))
    else:
        print_summary(opened, every=every)


@main.command("verify", epilog=EXIT_CODES)
@click.argument("artifact", type=ArtifactName())
@click.option("--json", "as_json", is_flag=True, help="Print findings as one JSON object, for programs.")
@revision_option
@click.pass_context
def verify_command(context: click.Context, artifact: Path | str, as_json: bool, revision: str | None) -> None:
    """Read every byte of ARTIFACT and compare it with the hashes made at conversion.

    A flipped bit, a truncated or missing file, a tensor that is not in the manifest: each finding names the file, the
    64 MiB chunk and the tensors it touches, so that only that file has to be fetched again.
    """
    from fut_runtime.artifact.report import ByteProgress, print_verification
    from fut_runtime.artifact.verify import Finding, VerifyReport, sealed_bytes, verify_artifact

    path = local_artifact(artifact, revision)
    try:
        with ByteProgress("verifying", sealed_bytes(path)) as progress:
            report = verify_artifact(path, progress.advance)
    except ArtifactError as error:
        report = VerifyReport(path, (Finding("not_an_artifact", "", str(error)),), 0, 0, ())
    if as_json:
        findings = [asdict(finding) for finding in report.findings]
        result = {"path": str(path), "ok": report.ok, "files": report.files, "bytes": report.nbytes}
        click.echo(json.dumps({**result, "findings": findings, "unsealed": report.unsealed}, indent=2))
    else:
        print_verification(report)
    context.exit(0 if report.ok else 1)


@main.command("export", epilog=EXIT_CODES)
@click.argument("artifact", type=ArtifactName())
@click.argument("out", type=_OUT)
@click.option(
    "--format",
    "weight_format",
    type=click.Choice(["int4", "e4m3", "bf16"]),
    help="Which stored weights to export: int4 is what decode computes with, e4m3 what prefill does. "
    "[default: the first of these that the artifact holds]",
)
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "f16", "f32"]),
    default="bf16",
    show_default=True,
    help="Storage type of the checkpoint. Only f32 holds every dequantised value exactly.",
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier export in OUT.")
@revision_option
def export_command(
    artifact: Path | str, out: Path, weight_format: str | None, dtype: str, overwrite: bool, revision: str | None
) -> None:
    """Write ARTIFACT to OUT as an ordinary Hugging Face checkpoint.

    The weights are dequantised, so the checkpoint is large; its purpose is to check the artifact's accuracy with any
    other tool:

    \b
        fut-artifact export my-artifact my-export --format int4
        python -c "import transformers as t; t.AutoModelForCausalLM.from_pretrained('my-export')"

    Norm gains that the conversion folded into the weights are divided out again. The artifact is verified first.
    """
    from fut_runtime.artifact.export import export_checkpoint
    from fut_runtime.artifact.report import ByteProgress, size_text

    opened = _verified(local_artifact(artifact, revision))
    with ByteProgress("exporting") as progress:
        result = export_checkpoint(
            opened, out, weight_format=weight_format, dtype=dtype, overwrite=overwrite, progress=progress.update
        )
    for name, columns in result.zero_gains.items():
        click.echo(
            f"note: {name}: gains of its norm that are exactly zero: {columns}. The weights that they multiply "
            "cannot be recovered; they are zero in the export, which computes the same",
            err=True,
        )
    click.echo(f"exported {result.weight_format} weights as {dtype} to {result.path} ({size_text(result.nbytes)})")


@main.command("repack", epilog=EXIT_CODES)
@click.argument("artifact", type=ArtifactName())
@click.argument("out", type=_OUT)
@click.option(
    "--nibble-order",
    type=click.Choice(list(NIBBLE_ORDERS)),
    default=DEFAULT_NIBBLE_ORDER,
    show_default=True,
    help="Order of the INT4 codes in the words that a GPU lane loads.",
)
@click.option("--overwrite", is_flag=True, help="Replace an artifact in OUT (which may be ARTIFACT itself).")
@revision_option
def repack_command(artifact: Path | str, out: Path, nibble_order: str, overwrite: bool, revision: str | None) -> None:
    """Rewrite ARTIFACT to OUT with its INT4 weights in another nibble order.

    Kernels of another release may want another order; codes, scales and everything else stay exactly as they are, and
    the new artifact is sealed like a fresh one. The artifact is verified first, so that damage is never sealed anew.
    Files outside the sealed set (logs, reports) are not copied.
    """
    from fut_runtime.artifact.repack import repack_artifact
    from fut_runtime.artifact.report import ByteProgress

    opened = _verified(local_artifact(artifact, revision))
    with ByteProgress("repacking") as progress:
        path = repack_artifact(opened, out, nibble_order, overwrite=overwrite, progress=progress.update)
    click.echo(f"repacked to {path} in order {nibble_order}")


def _verified(artifact: Path) -> Artifact:
    from fut_runtime.artifact.reader import Artifact
    from fut_runtime.artifact.report import ByteProgress
    from fut_runtime.artifact.verify import sealed_bytes, verify_artifact

    with ByteProgress("verifying", sealed_bytes(artifact)) as progress:
        report = verify_artifact(artifact, progress.advance)
    if not report.ok:
        raise ArtifactError(f"{report.findings[0].message} ({len(report.findings)} findings; see fut-artifact verify)")
    return Artifact.open(artifact)


if __name__ == "__main__":
    main()
