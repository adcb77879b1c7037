#!/usr/bin/env python3
"""Is decoding on the card right? Whole windows and single layers against the reference backend on the same card.

    python benchmarks/decode_accuracy.py OUT --text wiki.test.raw --windows 32
    python benchmarks/decode_accuracy.py OUT --text wiki.test.raw --modes int4+int4 --layer-windows 0

OUT is an artifact with the weights of all modes. Windows are teacher-forced through the decode path, 64 tokens a step
with the logits of each, and through the reference: difference of log-likelihood paired by window, KL divergence, and
how often both prefer the same token. Layers get identical inputs: relative RMS differences, equal codes of the cache,
and the same against FP32 arithmetic on the same weights and cache format. A mode passes when the mean difference is
within three of its standard errors and every layer keeps the contract of docs/numerics.md. Appends a JSON line a mode;
exit code 1 where one fails.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "benchmarks")]

from layer_agreement import layer_agreement, layer_faults  # noqa: E402

from fut_runtime.artifact.reader import Artifact  # noqa: E402
from fut_runtime.backend import Backend, load_backend  # noqa: E402
from fut_runtime.bench.machine import machine_facts  # noqa: E402
from fut_runtime.commands.bench_setup import append_line  # noqa: E402
from fut_runtime.evaluate.options import OpenedArtifact  # noqa: E402
from fut_runtime.evaluate.perplexity import PerplexityResult, evaluate_perplexity  # noqa: E402
from fut_runtime.evaluate.runner import BackendRunner, ReferenceRunner  # noqa: E402
from fut_runtime.reference import backend as reference  # noqa: E402
from fut_runtime.reference.backend import ReferenceBackend  # noqa: E402

#: Standard errors that the mean difference may be away from zero.
STANDARD_ERRORS = 3.0


def score(card: Backend, loaded: ReferenceBackend, windows: Tensor) -> PerplexityResult:
    """The card's likelihoods against the reference's, all through the decode path."""
    return evaluate_perplexity(BackendRunner(card), windows, baseline=ReferenceRunner(loaded.model, "decode"))


def window_faults(result: PerplexityResult) -> list[str]:
    """What is wrong with the likelihoods, in words."""
    difference = result.nll_difference
    if difference is None or math.isnan(difference.standard_error):
        return ["one window has no standard error: give more"]
    if abs(difference.mean) <= STANDARD_ERRORS * difference.standard_error:
        return []
    return [
        f"the log-likelihood differs by {difference.mean:+.2e} a token, {STANDARD_ERRORS:g} standard errors are "
        f"{STANDARD_ERRORS * difference.standard_error:.2e}"
    ]


def measure(
    artifact: Artifact, decode_mode: str, kv_cache: str, windows: Tensor, device: torch.device, layer_windows: int
) -> dict[str, Any]:
    """One mode's line."""
    modes = {"device": str(device), "decode_mode": decode_mode, "kv_cache": kv_cache}
    tokens = windows.shape[1]
    started = time.monotonic()
    loaded = reference.load(artifact, prefill_mode="decode", planned_tokens=tokens, **modes)  # type: ignore[arg-type]
    card = load_backend(artifact, "cuda", planned_tokens=tokens, planned_requests=1, prefill_mode="decode", **modes)
    try:
        result = score(card, loaded, windows)
    finally:
        card.release()
    seconds = {"windows": round(time.monotonic() - started, 1)}
    faults = window_faults(result)
    layers = None
    if layer_windows:
        started = time.monotonic()
        layers = layer_agreement(artifact, loaded, decode_mode, windows[:layer_windows], device)
        faults += layer_faults(layers)
        seconds["layers"] = round(time.monotonic() - started, 1)
    line = {"decode_mode": decode_mode, "kv_cache": kv_cache, **result.to_dict(), "layers": layers}
    return line | {"layer_windows": layer_windows, "seconds": seconds, "faults": faults, "passed": not faults}


def likelihoods(line: dict[str, Any]) -> str:
    """How the card's likelihoods differ from the reference's, for people."""
    difference, kl, top1 = (line[name] for name in ("nll_difference", "kl", "top1"))
    return (
        f"perplexity {line['perplexity']:.3f}, reference {line['baseline_perplexity']:.3f}; nats a token "
        f"{difference['mean']:+.2e} ± {difference['standard_error']:.1e}; KL {kl['mean']:.2e}; same top-1 "
        f"{top1['mean']:.2%}"
    )


def summary(line: dict[str, Any]) -> str:
    """A mode in a few lines for people."""
    verdict = "passed" if line["passed"] else "FAILED"
    text = [f"{line['decode_mode']} weights, {line['kv_cache']} cache: {verdict}", likelihoods(line)]
    if line["layers"] is not None:
        for name, values in line["layers"].items():
            low, middle, high = min(values), sorted(values)[len(values) // 2], max(values)
            text.append(f"{name}: {low:.4%} to {high:.4%}, median {middle:.4%} over {len(values)} layers")
    return "\n    ".join(text + line["faults"])


Measure = Callable[[Artifact, str, str, Tensor, torch.device], dict[str, Any]]


def run_modes(
    benchmark: str,
    artifact: str,
    text: Path,
    shape: tuple[int, int],
    modes: str,
    out: Path | None,
    measure: Measure,
    summary: Callable[[dict[str, Any]], str],
) -> None:
    """Measure modes "a+b,…" over `shape` windows and tokens, print and keep a line each; exit 1 where one fails."""
    device = torch.device("cuda")
    opened = Artifact.open(artifact)
    windows = OpenedArtifact(opened, {}).windows(text, shape[1], shape[0])
    facts = machine_facts(device)
    passed = True
    for mode in modes.split(","):
        first, second = mode.split("+")
        line = measure(opened, first, second, windows, device)
        line = {"benchmark": benchmark, "model": Path(artifact).name, "text": text.name, **line, **facts}
        print(summary(line), flush=True)
        append_line(out, line)
        passed = passed and line["passed"]
    sys.exit(not passed)


@click.command()
@click.argument("artifact", metavar="OUT")
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True, help="UTF-8 text.")
@click.option("--windows", "count", type=click.IntRange(2), default=32, show_default=True)
@click.option("--window", "tokens", type=click.IntRange(2), default=1024, show_default=True, help="Tokens a window.")
@click.option("--layer-windows", type=click.IntRange(0), default=2, show_default=True, help="Windows for the layers.")
@click.option("--modes", default="int4+int4,fp8+int4,bf16+bf16", show_default=True, help="Weights+cache, …")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Append JSON lines.")
def main(artifact: str, text: Path, count: int, tokens: int, layer_windows: int, modes: str, out: Path | None) -> None:
    """Measure every mode; exit code 1 where one is wrong."""
    with_layers = partial(measure, layer_windows=layer_windows)
    run_modes("decode_accuracy", artifact, text, (count, tokens), modes, out, with_layers, summary)


if __name__ == "__main__":
    main()
