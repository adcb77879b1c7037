"""What `fut-convert` shows a person: the plan, progress, and what came out."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fut_convert.pipeline import ConversionResult
from fut_convert.plan import Plan


def print_plan(plan: Plan, out: Path, console: Console | None = None) -> None:
    """The plan as a table, then sizes, warnings and what forbids it."""
    console = console or Console()
    model = plan.manifest.model
    console.print(
        f"[bold]{_identity(plan)}[/bold]: {model.architecture}, {model.num_layers} layers, hidden {model.hidden_size}, "
        f"{model.num_heads} heads over {model.num_kv_heads} KV heads of {model.head_dim}, "
        f"vocabulary {model.vocab_size}",
        highlight=False,
    )
    table = Table(title=f"recipe {plan.recipe.name}: {plan.recipe.description}", title_justify="left")
    for column in ("module", "format", "shape", "stored as", "group", "gain", "scales", "size", "bits/weight"):
        table.add_column(column, justify="right" if column in ("size", "bits/weight", "group") else "left")
    for row in plan.rows:
        padded = "" if row.padded_shape == row.shape else _shape(row.padded_shape)
        table.add_row(
            row.module, row.format, _shape(row.shape), padded, str(row.group_size or ""),
            "" if row.gain == "none" else row.gain, row.scale_method or "", size(row.bytes),
            f"{row.bits_per_weight:.2f}",
        )  # fmt: skip
    console.print(table)
    calibration = plan.manifest.calibration
    lines = [
        f"input {size(plan.input_bytes)}, artifact {size(plan.output_bytes)} "
        f"({size(plan.free_bytes)} free in {out.parent})",
        f"memory about {size(plan.memory_bytes)} ({size(plan.available_memory_bytes)} free)",
        "no calibration"
        if calibration is None
        else f"calibration: {calibration['windows']} windows of {calibration['window_tokens']} tokens, "
        f"text {calibration['text']}",
        f"side files: {', '.join(name for name, _ in plan.side_files) or 'none'}",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False)
    print_messages(plan, console)


def print_messages(plan: Plan, console: Console) -> None:
    """Warnings and errors of a plan."""
    for message in plan.warnings:
        console.print("[yellow]warning:[/yellow]", end=" ")
        console.print(message, highlight=False, markup=False)
    for message in plan.errors:
        console.print("[red]refused:[/red]", end=" ")
        console.print(message, highlight=False, markup=False)


def print_result(result: ConversionResult) -> None:
    """Sizes, time by step, memory, and the error of the stored weights."""
    console = Console()
    plan = result.plan
    seconds = result.seconds
    table = Table(title=f"{result.path}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("size", f"{size(plan.input_bytes)} → {size(plan.output_bytes)}")
    shares = ", ".join(
        f"{step} {100 * s / seconds:.0f} %" for step, s in sorted(result.step_seconds.items(), key=lambda i: -i[1])
    )
    table.add_row("time", f"{seconds:.1f} s ({plan.input_bytes / 1e9 / seconds:.3f} GB of input a second): {shares}")
    table.add_row("memory", f"{size(result.peak_memory_bytes)} at most (estimated {size(plan.memory_bytes)})")
    if result.peak_device_bytes is not None:
        table.add_row("device memory", f"{size(result.peak_device_bytes)} at most")
    for weight_format in plan.recipe.weights:
        errors = {n: e for n, e in result.module_error.items() if n.endswith(f".{weight_format}")}
        if errors and weight_format != "bf16":
            worst = max(errors, key=lambda n: errors[n])
            mean = sum(errors.values()) / len(errors)
            table.add_row(
                f"{weight_format} error",
                f"{100 * mean:.2f} % of the output on average, {100 * errors[worst]:.2f} % in "
                f"{worst.removesuffix('.' + weight_format)}",
            )
    console.print(table)


class ConversionDisplay:
    """Progress bar on standard error; silent when `quiet`."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=self._console,
        )  # fmt: skip
        self._task = self._bar.add_task("planning", total=None)

    def __enter__(self) -> ConversionDisplay:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._bar.stop()

    def show_plan(self, plan: Plan) -> None:
        """Print the plan's headline and warnings above the bar."""
        self._console.print(
            f"{_identity(plan)}: {size(plan.input_bytes)} → {size(plan.output_bytes)}, recipe {plan.recipe.name}",
            highlight=False,
            markup=False,
        )
        for message in plan.warnings:
            self._console.print(f"warning: {message}", highlight=False, markup=False)

    def progress(self, done: int, total: int, what: str) -> None:
        """Advance the bar."""
        self._bar.update(self._task, completed=done, total=total, description=what)


def size(count: int) -> str:
    """Bytes in decimal units."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}" if unit == "GB" else f"{count / factor:.1f} {unit}"
    return f"{count} bytes"


def _identity(plan: Plan) -> str:
    source = plan.manifest.source
    return str(source.get("id") or source.get("name") or source.get("kind"))


def _shape(shape: tuple[int, int]) -> str:
    return f"{shape[0]} × {shape[1]}"
