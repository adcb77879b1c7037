"""Perplexity of the checkpoint on a text, and of the artifact in everything it can be run as."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fut_convert.report.paths import accuracy_paths, artifact_head, checkpoint_head, checkpoint_path
from fut_convert.sources import Source
from fut_convert.sources.names import EMBEDDING
from fut_runtime.artifact.reader import Artifact
from fut_runtime.evaluate.perplexity import PerplexityResult, evaluate_perplexity
from fut_runtime.evaluate.streamed import FinishedRunner, stream
from fut_runtime.reference.numerics import FP32

#: Called as progress(done, total, what), see `conversion.Progress`.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class AccuracyRow:
    """One way to run the model.

    Attributes:
        name: which weights and activations.
        protocol: `prefill`, `decode` or `serve`; None for the checkpoint, where all give the same.
        cache: KV cache of the decode path, `INT4`, `BF16` or empty where nothing is decoded.
        result: against the checkpoint's row; that row itself has no divergence.
        seconds: what measuring it took.
    """

    name: str
    protocol: str | None
    cache: str
    result: PerplexityResult
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, but for numbers that are not finite."""
        return asdict(self)


@torch.inference_mode()
def measure_accuracy(
    source: Source, artifact: Artifact, windows: Tensor, device: torch.device, progress: Progress
) -> list[AccuracyRow]:
    """Score windows int64 [windows, tokens] with the checkpoint in FP32 and with every path of the artifact.

    Held at once: the final states of all windows twice in FP32, two heads, and one layer with its mapped pages.

    Raises:
        FutError: likelihoods are not finite.
    """
    paths = accuracy_paths(artifact, device)
    layers = source.spec.num_layers
    steps = layers * (1 + len(paths))

    def watch(row: int, name: str) -> Callable[[int], None]:
        def done(layer: int) -> None:
            artifact.release_pages()
            progress(row * layers + layer + 1, steps, f"evaluating: {name}")

        return done

    started = time.monotonic()
    name = "checkpoint's weights, FP32 compute"
    baseline_states = stream(
        checkpoint_path(source, device, FP32), source.load(EMBEDDING).to(device), windows, watch(0, name)
    )
    baseline_head = checkpoint_head(source, device, FP32)
    result = evaluate_perplexity(FinishedRunner(baseline_head, baseline_states), windows)
    rows = [AccuracyRow(name, None, "", result, time.monotonic() - started)]
    embed, head = artifact.tensor("embed").to(device), artifact_head(artifact, device)
    for number, named in enumerate(paths, start=1):
        started = time.monotonic()
        states = stream(named.path, embed, windows, watch(number, named.name))
        result = evaluate_perplexity(
            FinishedRunner(head, states), windows, baseline=FinishedRunner(baseline_head, baseline_states)
        )
        rows.append(AccuracyRow(named.name, named.path.protocol, named.cache, result, time.monotonic() - started))
    return rows
