"""The source checkpoint as the baseline of an evaluation."""

from __future__ import annotations

from fut_runtime.evaluate.runner import ReferenceRunner


def checkpoint_runner(checkpoint: str, device: str) -> ReferenceRunner:
    """Runner over a checkpoint's own weights, FP32 compute, nothing quantised.

    `checkpoint` is whatever `fut-convert` accepts. The converter knows how to read checkpoints and builds on the
    runtime, so it is imported only when a baseline is asked for.
    """
    from fut_convert.checkpoint_model import model_from_checkpoint
    from fut_convert.sources import open_source

    source = open_source(checkpoint)
    try:
        return ReferenceRunner(model_from_checkpoint(source, device=device), "prefill")
    finally:
        source.close()
