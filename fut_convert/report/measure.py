"""Everything the report measures on the finished artifact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fut_convert.errors import ReportError, ReportInterrupted
from fut_convert.evaluation_text import independence_note
from fut_convert.plan import Plan
from fut_convert.report.accuracy import AccuracyRow, Progress, measure_accuracy
from fut_convert.report.depth import DepthErrors, depth_errors
from fut_convert.report.paths import checkpoint_path, depth_paths
from fut_convert.sources import Source
from fut_convert.sources.names import EMBEDDING
from fut_convert.steps import StepClock
from fut_runtime.artifact.reader import Artifact
from fut_runtime.command_errors import INTERRUPTED
from fut_runtime.errors import FutError, is_out_of_memory
from fut_runtime.reference.numerics import EXACT


@dataclass(frozen=True)
class PathDepth:
    """Errors of one path through the depth; `protocol` and `cache` as in `AccuracyRow`."""

    name: str
    protocol: str
    cache: str
    errors: DepthErrors

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, but for numbers that are not finite."""
        return {**asdict(self), "middle": self.errors.middle, "end": self.errors.end}


@dataclass(frozen=True)
class Measurements:
    """What was measured on the artifact.

    Attributes:
        depth: by path; empty where there was no text to run.
        depth_text: record of the windows that the depth was measured on, as a calibration's.
        accuracy: rows of the accuracy table; empty without an evaluation text.
        accuracy_text: record of that text.
        independence: one sentence on what it shares with the calibration text.
    """

    depth: tuple[PathDepth, ...] = ()
    depth_text: dict[str, Any] | None = None
    accuracy: tuple[AccuracyRow, ...] = ()
    accuracy_text: dict[str, Any] | None = None
    independence: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, but for numbers that are not finite."""
        return {
            "depth": {"text": self.depth_text, "paths": [path.to_dict() for path in self.depth]},
            "accuracy": {
                "text": self.accuracy_text,
                "independence": self.independence,
                "rows": [row.to_dict() for row in self.accuracy],
            },
        }


def measure(
    source: Source, plan: Plan, artifact: Artifact, device: torch.device, clock: StepClock, progress: Progress
) -> Measurements:
    """Measure the error through the depth and accuracy, each on the windows that the plan has for it.

    Raises:
        FutError: the artifact's likelihoods on the evaluation text are not finite.
    """
    depth: list[PathDepth] = []
    record = None
    if plan.depth is not None:
        record = plan.depth.record
        with clock("report"):
            depth = _depth(source, artifact, plan.depth.ids, device, progress)
    if plan.evaluation is None:
        return Measurements(tuple(depth), record)
    with clock("evaluate"):
        rows = measure_accuracy(source, artifact, plan.evaluation.ids, device, progress)
    note = independence_note(plan.evaluation, plan.windows)
    return Measurements(tuple(depth), record, tuple(rows), plan.evaluation.record, note)


@contextmanager
def finishing(path: Path) -> Iterator[None]:
    """While the report on the sealed artifact `path` is made: whatever ends it must not look like a lost conversion.

    Raises:
        ReportError, ReportInterrupted: in place of what went wrong; both say that the artifact is whole.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        message = f"interrupted; {path.name} is whole, but its report is not finished"
        raise ReportInterrupted(message, getattr(error, "exit_code", INTERRUPTED)) from error
    except (FutError, MemoryError, RuntimeError) as error:
        if not isinstance(error, FutError) and not is_out_of_memory(error):
            raise
        raise ReportError(
            f"{path.name} is whole, but its report could not be finished: {error}; fut-run eval perplexity measures "
            "it again, and --no-report converts without"
        ) from error


def _depth(
    source: Source, artifact: Artifact, windows: torch.Tensor, device: torch.device, progress: Progress
) -> list[PathDepth]:
    layers = source.spec.num_layers

    def done(layer: int) -> None:
        artifact.release_pages()
        progress(layer + 1, layers, f"measuring layer {layer + 1} of {layers}")

    named = depth_paths(artifact, device)
    errors = depth_errors(
        checkpoint_path(source, device, EXACT),
        {f"{n.path.protocol} {n.name}": n.path for n in named},
        source.load(EMBEDDING)[windows].to(device),
        done,
    )
    return [PathDepth(n.name, n.path.protocol, n.cache, e) for n, e in zip(named, errors.values(), strict=True)]
