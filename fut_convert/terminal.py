"""What `fut-convert` shows a person: the plan, progress, and what came out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fut_convert.memory_budget import MemoryPlan
from fut_convert.plan import Plan
from fut_convert.plan_rows import ModuleRow
from fut_convert.report.wording import percent, size
from fut_convert.result import ConversionResult
from fut_convert.sources.stream_plan import StreamPlan
from fut_runtime.artifact.json_text import shown
from fut_runtime.streams import for_terminal


def print_plan(plan: Plan, out: Path, console: Console | None = None) -> None:
    """The plan as a table, then sizes and warnings; what forbids it is raised by `Plan.require_feasible`."""
    console = console or Console()
    model = plan.manifest.model
    console.print(
        f"[bold]{escape(_identity(plan))}[/bold]: {model.architecture}, {model.num_layers} layers, "
        f"hidden {model.hidden_size}, {model.num_heads} heads over {model.num_kv_heads} KV heads of {model.head_dim}, "
        f"vocabulary {model.vocab_size}",
        highlight=False,
    )
    console.print(_plan_table(plan))
    calibration = plan.manifest.calibration
    padded = [f"{r.module} {r.format} to {_shape(r.padded_shape)}" for r in plan.rows if r.padded_shape != r.shape]
    lines = [
        *([f"padded: {', '.join(padded)}"] if padded else []),
        f"input {size(plan.input_bytes)}{_to_come(plan.fetch_bytes)}, artifact {size(plan.output_bytes)} "
        f"({size(plan.free_bytes)} free in {out.parent})",
        *([] if plan.stream is None else [_stream_line(plan.stream)]),
        *_memory_lines(plan.memory),
        "no calibration" if calibration is None else f"calibration: {_text(calibration)}",
        *plan.notes,
        *([] if plan.evaluation is None else [f"evaluation: {_text(plan.evaluation.record)}"]),
        f"side files: {', '.join(shown(name) for name, _ in plan.side_files) or 'none'}",
    ]
    for line in lines:
        console.print(for_terminal(line), highlight=False, markup=False)
    _print_warnings(plan, console)


def _to_come(fetch_bytes: int) -> str:
    return f", of which {size(fetch_bytes)} are yet to be fetched" if fetch_bytes else ""


def _stream_line(stream: StreamPlan) -> str:
    return (
        f"streamed from the Hub: {size(stream.fetched_bytes)} in {len(stream.order)} files, each fetched once; at most "
        f"{size(stream.peak_bytes)} on the disk at a time"
    )


def _memory_lines(memory: MemoryPlan) -> list[str]:
    lines = [f"memory about {size(memory.host_bytes)} ({size(memory.host_limit)} free)"]
    if memory.device_bytes is not None and memory.device_limit is not None:
        lines.append(f"device memory about {size(memory.device_bytes)} ({size(memory.device_limit)} free)")
    if memory.activation_bytes:
        where = {"device": "on the device" if memory.device_steps else "in memory", "host": "in host memory"}
        lines.append(
            f"activations of all windows: {size(memory.activation_bytes)} {where.get(memory.place, 'on the disk')}"
        )
    return lines


def _plan_table(plan: Plan) -> Table:
    """Rows of the plan, in 80 columns."""
    title = escape(f"recipe {plan.recipe.name}: {plan.recipe.description}")
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in ("module", "format", "shape", "group", "gain", "scales", "size", "bits"):
        table.add_column(column, justify="right" if column in ("group", "size", "bits") else "left", no_wrap=True)
    for row in plan.rows:
        table.add_row(
            _module(row, plan.manifest.model.num_layers), row.format, _shape(row.shape), str(row.group_size or ""),
            "" if row.gain == "none" else row.gain, row.scale_method or "", size(row.bytes),
            f"{row.bits_per_weight:.2f}",
        )  # fmt: skip
    return table


def _module(row: ModuleRow, layers: int) -> str:
    """A module, with the number of its layers where the others store it otherwise."""
    return row.module if row.layers in (None, layers) else f"{row.module} ×{row.layers}"


def _print_warnings(plan: Plan, console: Console) -> None:
    for message in plan.warnings:
        console.print(Text.assemble(("warning:", "yellow"), " ", for_terminal(message)))


def print_result(result: ConversionResult) -> None:
    """Sizes, time by step, memory, and the error of the stored weights."""
    console = Console()
    plan = result.plan
    seconds = result.seconds
    table = Table(title=escape(_as_typed(result.path)), title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("size", f"{size(plan.input_bytes)} → {size(plan.output_bytes)}")
    busy = sum(result.step_seconds.values())
    shares = ", ".join(
        f"{step} {100 * s / busy:.0f} %" for step, s in sorted(result.step_seconds.items(), key=lambda i: -i[1])
    )
    table.add_row("time", f"{seconds:.1f} s ({plan.input_bytes / 1e9 / seconds:.3f} GB of input a second): {shares}")
    table.add_row("memory", f"{size(result.peak_memory_bytes)} at most (estimated {size(plan.memory.host_bytes)})")
    if result.peak_device_bytes is not None:
        predicted = size(plan.memory.device_bytes or 0)
        table.add_row("device memory", f"{size(result.peak_device_bytes)} at most (predicted {predicted})")
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
    if result.gptq:
        table.add_row("GPTQ", gptq_line(result.gptq))
    for path in result.measurements.depth:
        far = f"{percent(path.errors.end)} of the residual stream behind the last layer"
        table.add_row(f"{path.protocol} error", f"{far}, {path.name}")
    for row in result.measurements.accuracy:
        name = row.name + (f", {row.cache} cache" if row.cache else "")
        table.add_row(row.protocol or "checkpoint", f"perplexity {row.result.perplexity:.3f}, {name}")
    if result.report is not None:
        table.add_row("report", escape(_as_typed(result.report)))
    console.print(table)


def gptq_line(outcomes: Mapping[str, Mapping[str, Any]]) -> str:
    """Where GPTQ had to raise its damping or gave way to rounding to nearest: `ConversionResult.gptq` in a line."""
    damped: dict[float, int] = {}
    for outcome in outcomes.values():
        if outcome["damping"] is not None:
            damped[outcome["damping"]] = damped.get(outcome["damping"], 0) + 1
    line = ", ".join(f"{count} modules with damping {damping:g}" for damping, count in sorted(damped.items()))
    failed = [name for name, outcome in outcomes.items() if outcome["fallback"] is not None]
    if failed:
        line += (
            f"{'; ' if line else ''}rounded to nearest instead: {', '.join(failed)} ({outcomes[failed[0]]['fallback']})"
        )
    return line


class ConversionDisplay:
    """Progress bar on standard error, where that is a terminal; silent when `quiet`."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=self._console, transient=True, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("planning", total=None)
        self.started = False

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
        _print_warnings(plan, self._console)

    def show_resume(self, done: int, layers: int) -> None:
        """Say that an interrupted conversion goes on."""
        self._console.print(
            f"going on after {done} of {layers} layers, which an interrupted conversion left (--restart begins anew)",
            highlight=False,
            markup=False,
        )

    def progress(self, done: int, total: int, what: str) -> None:
        """Advance the bar."""
        self.started = True
        self._bar.update(self._task, completed=done, total=total, description=what)


def _text(record: Mapping[str, Any]) -> str:
    return f"{record['windows']} windows of {record['window_tokens']} tokens, text {shown(str(record['text']))}"


def _identity(plan: Plan) -> str:
    source = plan.manifest.source
    return shown(str(source.get("id") or source.get("name") or source.get("kind")))


def _shape(shape: tuple[int, int]) -> str:
    return f"{shape[0]}×{shape[1]}"


def _as_typed(path: Path) -> str:
    """A path below the current directory relative to it, any other as it is."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
