"""`fut-run eval divergence`: an artifact against the checkpoint that it was made from."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fut_runtime.evaluate.divergence import DivergenceResult, WorstToken, evaluate_divergence
from fut_runtime.evaluate.options import (
    OpenedArtifact,
    open_artifact,
    percent,
    plus_minus,
    runner_options,
    settings_rows,
    to_json,
)
from fut_runtime.tokenizer import Tokenizer


@click.command("divergence")
@click.argument("artifact", metavar="OUT")
@click.option("--baseline", metavar="MODEL", required=True, help="Source checkpoint (FP32 compute).")
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True, help="UTF-8 text.")
@click.option(
    "--window", "window_tokens", type=click.IntRange(2), default=2048, show_default=True, help="Tokens a window."
)
@click.option("--max-windows", type=click.IntRange(1), help="Score only the first N windows.")
@click.option("--buckets", type=click.IntRange(0), default=0, metavar="N", help="Divide each window into N parts.")
@click.option("--worst", type=click.IntRange(0), default=0, metavar="N", help="List the N tokens of the greatest KL.")
@runner_options
def divergence(
    artifact: str, baseline: str, text: Path, window_tokens: int, max_windows: int | None, buckets: int, worst: int,
    as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Divergence of the artifact OUT from the checkpoint it was made from, on a text.

    KL(checkpoint || artifact) with its quantiles over tokens, how often both prefer the same token, and the difference
    of their log-likelihoods paired by window; with --buckets along the window, with --worst token by token.

    \b
    Examples:
      fut-run eval divergence out/ --baseline SmolLM2-135M-Instruct.Q4_1.gguf --text wiki.test.raw --max-windows 8
      fut-run eval divergence out/ --baseline ./checkpoint --text wiki.test.raw --protocol serve --buckets 8 --worst 20
    """
    opened = open_artifact(artifact, options, window_tokens)
    windows = opened.windows(text, window_tokens, max_windows)
    base = opened.baseline(baseline)
    console = Console(stderr=True, quiet=as_json or not sys.stderr.isatty())
    started = time.monotonic()
    with console.status("scoring") as status:
        result = evaluate_divergence(
            opened.runner, base, windows, buckets=buckets, worst=worst,
            progress=lambda i, kl: status.update(f"window {i + 1} of {len(windows)}: KL {kl:.4f}"),
        )  # fmt: skip
    seconds = round(time.monotonic() - started, 2)
    settings = {"text": text.name, **opened.settings, "seconds": seconds, **opened.saturation()}
    if as_json:
        click.echo(to_json({**settings, **_with_text(result, opened.tokenizer())}))
    else:
        _print(result, settings, opened)


def _with_text(result: DivergenceResult, tokenizer: Tokenizer) -> dict[str, object]:
    """The result for programs, with the text of the tokens it names."""
    return {**result.to_dict(), "worst": [{**vars(w), **_texts(w, tokenizer)} for w in result.worst]}


def _texts(worst: WorstToken, tokenizer: Tokenizer) -> dict[str, str]:
    return {
        "context_text": tokenizer.decode(worst.context, skip_special_tokens=False),
        "token_text": tokenizer.piece(worst.token),
        "top_text": tokenizer.piece(worst.top),
        "baseline_top_text": tokenizer.piece(worst.baseline_top),
    }


def _print(result: DivergenceResult, settings: dict[str, object], opened: OpenedArtifact) -> None:
    console = Console()
    table = Table(title=f"{result.windows} windows of {result.window_tokens} tokens", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in settings_rows(settings):
        table.add_row(name, value)
    table.add_row("KL(checkpoint ‖ artifact)", plus_minus(result.overall.kl))
    for share, kl in result.kl_quantiles.items():
        table.add_row("greatest" if share == "1" else f"{100 * float(share):g} % of tokens below", f"{kl:.4f}")
    table.add_row("same most likely token", percent(result.overall.top1))
    table.add_row("nats a token more, paired", plus_minus(result.overall.nll_difference))
    change = result.perplexity / result.baseline_perplexity - 1
    table.add_row("perplexity", f"{result.perplexity:.3f} ({change:+.1%} on {result.baseline_perplexity:.3f})")
    if "saturated_share" in settings:
        table.add_row("saturated E4M3 activations", f"{settings['saturated_share']:.2e}")
    table.add_row("seconds", str(settings["seconds"]))
    console.print(table)
    if result.buckets:
        along = Table("positions", "KL", "same token", "nats more", title="along the window")
        for part in result.buckets:
            first, last = part.positions
            along.add_row(f"{first}–{last}", plus_minus(part.kl), percent(part.top1), plus_minus(part.nll_difference))
        console.print(along)
    if result.worst:
        tokenizer = opened.tokenizer()
        listed = Table("KL", "where", "after", "comes", "checkpoint", "artifact", title="worst tokens")
        for one in result.worst:
            texts = _texts(one, tokenizer)
            shown = [Text(repr(texts[k])) for k in ("token_text", "baseline_top_text", "top_text")]
            listed.add_row(
                f"{one.kl:.2f}", f"{one.window}:{one.position}", Text(repr(texts["context_text"][-40:])), *shown
            )
        console.print(listed)
