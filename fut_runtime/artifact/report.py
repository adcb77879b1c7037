"""How `fut-artifact` prints: tables for people, progress on a terminal."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from fut_runtime.artifact.inspect import format_totals, report_of, tensor_rows
from fut_runtime.artifact.json_text import shown
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.verify import VerifyReport
from fut_runtime.streams import for_terminal

#: Width of tables that go to a file or a pipe, where there is no terminal to ask.
_PIPE_WIDTH = 160


class ByteProgress:
    """A progress bar in bytes on standard error; silent where that is no terminal."""

    def __init__(self, what: str, total: int | None = None) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task(what, total=total or None)

    def __enter__(self) -> ByteProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stop(self) -> None:
        """Take the bar off the terminal, for what else has to be shown there."""
        self._progress.stop()

    def advance(self, nbytes: int) -> None:
        """Say that `nbytes` more are done."""
        self._progress.advance(self._task, nbytes)

    def update(self, done: int, total: int) -> None:
        """Say how many of how many bytes are done."""
        self._progress.update(self._task, completed=done, total=total)


def size_text(nbytes: int) -> str:
    """A size in the decimal units that disks are sold in."""
    size = float(nbytes)
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def print_summary(artifact: Artifact, *, every: bool) -> None:
    """Print model, tensors and totals of an artifact."""
    console = _console()
    manifest, model = artifact.manifest, artifact.manifest.model
    source = " ".join(f"{shown(key)}={shown(str(value))}" for key, value in manifest.source.items())
    cache = f"{manifest.kv_cache.bits} bit" + (", rotated" if manifest.kv_cache.rotation else "")
    lines = {
        "artifact": f"{artifact.path} (format {manifest.format_version})",
        "model": f"{model.architecture}, {model.num_layers} layers, hidden {model.hidden_size}, "
        f"intermediate {model.intermediate_size}, {model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}, "
        f"vocabulary {model.vocab_size}, {model.max_position_embeddings} positions",
        "source": source,
        "KV cache": cache,
        "head": f"{manifest.head}" + (", tied to the embedding" if "head" not in manifest.weights else ""),
        "activations": "calibrated" if manifest.activation.calibrated else "conservative initial scales",
        "side files": ", ".join(sorted(manifest.side_files)) or "none",
        "report": report_of(artifact) or "none",
    }
    for key, value in lines.items():
        console.print(f"[bold]{key:<12}[/bold] {escape(for_terminal(value))}", soft_wrap=True, highlight=False)
    table = Table("tensor", "type", "stored shape", header_style="bold")
    for column in ("count", "bytes"):
        table.add_column(column, justify="right")
    table.columns[0].overflow = "fold"
    for row in tensor_rows(artifact, every=every):
        shape = " × ".join(map(str, row.shape))
        table.add_row(escape(row.name), row.dtype, shape, str(row.count), size_text(row.nbytes))
    console.print(table)
    totals = Table("weights", header_style="bold")
    for column in ("true weights", "bytes", "bits per weight"):
        totals.add_column(column, justify="right")
    for total in format_totals(artifact):
        bits = f"{total.bits_per_weight:.3f}" if total.weights else ""
        totals.add_row(total.name, f"{total.weights:,}" if total.weights else "", size_text(total.nbytes), bits)
    size = sum(f.size for f in artifact.files.values())
    totals.add_section()
    totals.add_row(f"{len(artifact.files)} files", "", size_text(size), "")
    console.print(totals)


def print_verification(report: VerifyReport) -> None:
    """Print what a verification found."""
    console = _console()
    for finding in report.findings:
        message = escape(for_terminal(finding.message))
        console.print(f"[red]{finding.kind}[/red]: {message}", soft_wrap=True, highlight=False)
    if report.unsealed:
        console.print(f"not part of the sealed set: {escape(', '.join(map(shown, report.unsealed)))}", soft_wrap=True)
    if report.ok:
        console.print(f"[green]whole[/green]: {report.files} files, {size_text(report.nbytes)}, every hash is right")
    else:
        console.print(f"[red]damaged[/red]: {len(report.findings)} findings")


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
