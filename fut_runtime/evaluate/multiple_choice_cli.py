"""`fut-run eval multiple-choice`: accuracy of an artifact, and of its checkpoint, on lm-eval's tasks."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from rich.console import Console
from rich.table import Table

from fut_runtime.backend import Backend
from fut_runtime.engine import Engine
from fut_runtime.evaluate.continuations import ReferenceScorer, Scorer
from fut_runtime.evaluate.multiple_choice import (
    Answers,
    MultipleChoiceResult,
    Task,
    ask,
    hub_task,
    local_task,
    require_harness,
    summarize,
)
from fut_runtime.evaluate.options import (
    open_artifact,
    percent,
    runner_options,
    settings_rows,
    to_json,
)
from fut_runtime.evaluate.questions import TASKS
from fut_runtime.evaluate.runner import ReferenceRunner
from fut_runtime.reference.backend import ReferenceBackend
from fut_runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rich.status import Status

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("multiple-choice")
@click.argument("artifact", metavar="OUT")
@click.option("--task", type=click.Choice(tuple(TASKS)), required=True)
@click.option("--data", type=_FILE, help="JSON-lines file of the task; without it, from the Hub.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Ask only the first N questions.")
@click.option("--few-shot", type=click.IntRange(0), default=0, show_default=True, metavar="K", help="Examples first.")
@click.option(
    "--few-shot-data", type=_FILE, help="Where the examples come from; else the first of --data, not asked then."
)
@click.option("--baseline", metavar="MODEL", help="Source checkpoint to ask the same (FP32 compute).")
@runner_options
def multiple_choice(
    artifact: str, task: str, data: Path | None, limit: int | None, few_shot: int, few_shot_data: Path | None,
    baseline: str | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Accuracy of the artifact OUT on ARC-Challenge or HellaSwag, asked and counted by lm-eval (extra `eval`).

    The answer with the greatest log-likelihood counts (acc), or the greatest for its length in characters (acc_norm).
    With --baseline the checkpoint answers the same questions, and differences are paired by question.

    \b
    Examples:
      fut-run eval multiple-choice out/ --task arc_challenge --data arc_challenge_test.jsonl --limit 100
      fut-run eval multiple-choice out/ --task hellaswag --data hellaswag.jsonl --few-shot 5 --baseline ./checkpoint
    """
    if data is None and few_shot_data is not None:
        raise click.UsageError("--few-shot-data goes with --data; a task of the Hub brings its own examples")
    require_harness()
    opened = open_artifact(artifact, options)
    tokenizer = opened.tokenizer()
    asked = (
        hub_task(task, few_shot=few_shot)
        if data is None
        else local_task(task, data, few_shot=few_shot, few_shot_data=few_shot_data)
    )
    asked = replace(asked, limit=limit)
    base = None if baseline is None else opened.baseline(baseline)
    console = Console(stderr=True, quiet=as_json or not sys.stderr.isatty())
    started = time.monotonic()
    with console.status("asking") as status:
        ours, truncated = _answers(asked, opened.scorer(), opened.backend, tokenizer, status, "artifact")
        theirs = None
        if base is not None:
            theirs, _ = _answers(asked, ReferenceScorer(base), _backend_of(base), tokenizer, status, "checkpoint")
    result = summarize(asked, ours, theirs)
    seconds = round(time.monotonic() - started, 2)
    settings: dict[str, object] = {
        "data": "hub" if data is None else data.name, **opened.settings, "truncated": truncated, "seconds": seconds,
        **opened.saturation(),
    }  # fmt: skip
    if as_json:
        click.echo(to_json({**settings, **result.to_dict()}))
    else:
        _print(result, settings)


def _answers(
    task: Task, scorer: Scorer, backend: Backend, tokenizer: Tokenizer, status: Status, who: str
) -> tuple[Answers, int]:
    """A model's answers, and how many of its contexts were too long."""
    from fut_runtime.evaluate.harness import EngineLM

    def progress(done: int, total: int) -> None:
        status.update(f"{who}: {done} of {total} answers weighed")

    model = EngineLM(Engine.from_backend(backend, tokenizer), scorer, progress)
    return ask(model, task), model.truncated


def _backend_of(runner: ReferenceRunner) -> ReferenceBackend:
    """The engine of a checkpoint, which has no E4M3 sites to scale."""
    spec = runner.model.spec
    return ReferenceBackend(runner.model, torch.ones(spec.num_layers, 4), 1.0, "frozen")


def _print(result: MultipleChoiceResult, settings: dict[str, object]) -> None:
    title = f"{result.task}: {result.questions} questions, {result.few_shot}-shot"
    table = Table(title=title, show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in settings_rows(settings):
        table.add_row(name, value)
    table.add_row("acc", percent(result.acc))
    table.add_row("acc_norm", percent(result.acc_norm))
    for name, estimate in (
        ("checkpoint's acc", result.baseline_acc),
        ("checkpoint's acc_norm", result.baseline_acc_norm),
        ("acc difference, paired", result.acc_difference),
        ("acc_norm difference, paired", result.acc_norm_difference),
        ("same choice", result.same_choice),
    ):
        if estimate is not None:
            table.add_row(name, percent(estimate))
    if settings["truncated"]:
        table.add_row("too long, cut at the beginning", str(settings["truncated"]))
    table.add_row("seconds", str(settings["seconds"]))
    Console().print(table)
