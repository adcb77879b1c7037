#!/usr/bin/env python3
"""Is prefill on the card right? Whole windows of a text against the reference backend on the same card.

    python benchmarks/prefill_accuracy.py OUT --text wiki.test.raw
    python benchmarks/prefill_accuracy.py OUT --text wiki.test.raw --modes e4m3+prefill --windows 64

OUT is an artifact with the weights of all modes. A window is read as one prompt (protocol prefill), or its first half
is and the rest is decoded (serve), with the logits after every token: difference of log-likelihood paired by window, KL
divergence, and how often both prefer the same token. A mode passes when the mean difference is within three of its
standard errors. Single logits would prove less: in E4M3 a sum that is off in its last bits moves codes by a twelfth,
and a model with outliers turns that into anything, as the reference itself does when its sums are cut off as the tensor
cores cut them (docs/numerics.md). Appends a JSON line a mode; exit code 1 where one fails.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "benchmarks")]

from decode_accuracy import likelihoods, run_modes, window_faults  # noqa: E402

from fut_runtime.artifact.reader import Artifact  # noqa: E402
from fut_runtime.backend import load_backend  # noqa: E402
from fut_runtime.evaluate.perplexity import evaluate_perplexity  # noqa: E402
from fut_runtime.evaluate.runner import BackendRunner, ReferenceRunner  # noqa: E402
from fut_runtime.reference import backend as reference  # noqa: E402

#: Weights and cache that decoding has beside prompts of a mode.
DECODING = {"e4m3": ("int4", "int4"), "bf16": ("bf16", "bf16")}


def measure(
    artifact: Artifact, prefill_mode: str, protocol: str, windows: Tensor, device: torch.device
) -> dict[str, Any]:
    """One mode's line."""
    decode_mode, kv_cache = DECODING[prefill_mode]
    modes: dict[str, Any] = {
        "device": str(device), "prefill_mode": prefill_mode, "decode_mode": decode_mode, "kv_cache": kv_cache,
        "planned_tokens": windows.shape[1],
    }  # fmt: skip
    if prefill_mode == "e4m3":
        modes["scale_mode"] = "request"
    started = time.monotonic()
    loaded = reference.load(artifact, **modes)
    card = load_backend(artifact, "cuda", planned_requests=1, **modes)
    try:
        baseline = ReferenceRunner(loaded.model, protocol, loaded.new_scales)
        result = evaluate_perplexity(BackendRunner(card, protocol), windows, baseline=baseline)
    finally:
        card.release()
    faults = window_faults(result)
    line = {"prefill_mode": prefill_mode, "protocol": protocol, "decode_mode": decode_mode, "kv_cache": kv_cache}
    seconds = round(time.monotonic() - started, 1)
    return line | result.to_dict() | {"seconds": seconds, "faults": faults, "passed": not faults}


def summary(line: dict[str, Any]) -> str:
    """A mode in a few lines for people."""
    verdict = "passed" if line["passed"] else "FAILED"
    head = f"{line['prefill_mode']} prefill, {line['protocol']}: {verdict}"
    return "\n    ".join([head, likelihoods(line), *line["faults"]])


@click.command()
@click.argument("artifact", metavar="OUT")
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True, help="UTF-8 text.")
@click.option("--windows", "count", type=click.IntRange(2), default=32, show_default=True)
@click.option("--window", "tokens", type=click.IntRange(2), default=2048, show_default=True, help="Tokens a window.")
@click.option(
    "--modes", default="e4m3+prefill,e4m3+serve,bf16+prefill,bf16+serve", show_default=True, help="Mode+protocol, …"
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Append JSON lines.")
def main(artifact: str, text: Path, count: int, tokens: int, modes: str, out: Path | None) -> None:
    """Measure every mode; exit code 1 where one is wrong."""
    run_modes("prefill_accuracy", artifact, text, (count, tokens), modes, out, measure, summary)


if __name__ == "__main__":
    main()
