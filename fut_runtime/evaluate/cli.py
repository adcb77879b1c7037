"""`fut-run eval`: accuracy of an artifact."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from fut_runtime.evaluate.divergence_cli import divergence
from fut_runtime.evaluate.multiple_choice_cli import multiple_choice
from fut_runtime.evaluate.options import (
    open_artifact,
    percent,
    plus_minus,
    runner_options,
    settings_rows,
    to_json,
)
from fut_runtime.evaluate.perplexity import PerplexityResult, evaluate_perplexity


@click.group("eval")
def eval_group() -> None:
    """Measure an artifact's accuracy."""


@eval_group.command("perplexity")
@click.argument("artifact", metavar="OUT")
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True, help="UTF-8 text.")
@click.option(
    "--window", "window_tokens", type=click.IntRange(2), default=2048, show_default=True, help="Tokens a window."
)
@click.option("--max-windows", type=click.IntRange(1), help="Score only the first N windows.")
@click.option("--baseline", metavar="MODEL", help="Source checkpoint to measure divergence from (FP32 compute).")
@runner_options
def perplexity(
    artifact: str, text: Path, window_tokens: int, max_windows: int | None, baseline: str | None, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Perplexity of the artifact OUT on a text.

    The text is cut into windows that do not overlap, and every token but each window's first is scored. With
    --baseline the report adds the checkpoint's own perplexity, KL(checkpoint || artifact), how often both prefer the
    same token, and standard errors over windows; `divergence` says more about that.

    \b
    Examples:
      fut-run eval perplexity out/ --text wiki.test.raw
      fut-run eval perplexity out/ --text wiki.test.raw --backend cuda
      fut-run eval perplexity out/ --text wiki.test.raw --protocol serve --baseline SmolLM2-135M-Instruct.Q4_1.gguf
    """
    opened = open_artifact(artifact, options, window_tokens)
    windows = opened.windows(text, window_tokens, max_windows)
    base = None if baseline is None else opened.baseline(baseline)
    console = Console(stderr=True, quiet=as_json or not sys.stderr.isatty())
    started = time.monotonic()
    with console.status("scoring") as status:
        result = evaluate_perplexity(
            opened.runner, windows, baseline=base,
            progress=lambda i, ppl: status.update(f"window {i + 1} of {len(windows)}: perplexity {ppl:.3f}"),
        )  # fmt: skip
    seconds = round(time.monotonic() - started, 2)
    settings = {"text": text.name, **opened.settings, "seconds": seconds, **opened.saturation()}
    if as_json:
        click.echo(to_json({**settings, **result.to_dict()}))
    else:
        _print(result, settings)


def _print(result: PerplexityResult, settings: dict[str, object]) -> None:
    table = Table(title=f"{result.windows} windows of {result.window_tokens} tokens", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in settings_rows(settings):
        table.add_row(name, value)
    table.add_row("perplexity", f"{result.perplexity:.3f}")
    table.add_row("nats a token", plus_minus(result.nll))
    if result.baseline_perplexity is not None and result.nll_difference and result.kl and result.top1:
        change = result.perplexity / result.baseline_perplexity - 1
        table.add_row("checkpoint's perplexity", f"{result.baseline_perplexity:.3f} ({change:+.1%})")
        table.add_row("difference, paired", plus_minus(result.nll_difference))
        table.add_row("KL(checkpoint ‖ artifact)", plus_minus(result.kl))
        table.add_row("same most likely token", percent(result.top1))
    if "saturated_share" in settings:
        table.add_row("saturated E4M3 activations", f"{settings['saturated_share']:.2e}")
    table.add_row("seconds", str(settings["seconds"]))
    Console().print(table)


eval_group.add_command(divergence)
eval_group.add_command(multiple_choice)
