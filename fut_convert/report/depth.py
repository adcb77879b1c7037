"""How far the artifact's residual stream is from the checkpoint's, layer by layer: the paper's table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fut_runtime.evaluate.streamed import StreamedPath


@dataclass(frozen=True)
class DepthErrors:
    """Relative RMS errors of a path behind each layer.

    Attributes:
        per_layer: of each layer alone, on the checkpoint's own input.
        accumulated: of all layers up to it, on what the path's layers before it made.
        plain_per_layer, plain_accumulated: the same as the quotient of sums over all tokens, in which large ones count
            for more.
    """

    per_layer: tuple[float, ...]
    accumulated: tuple[float, ...]
    plain_per_layer: tuple[float, ...]
    plain_accumulated: tuple[float, ...]

    @property
    def middle(self) -> float:
        """Accumulated behind the first half of the layers."""
        return self.accumulated[(len(self.accumulated) + 1) // 2 - 1]

    @property
    def end(self) -> float:
        """Accumulated behind the last layer."""
        return self.accumulated[-1]


@torch.inference_mode()
def depth_errors(
    reference: StreamedPath,
    paths: Mapping[str, StreamedPath],
    embedded: Tensor,
    progress: Callable[[int], None] | None = None,
) -> dict[str, DepthErrors]:
    """Run the reference and every path over the same windows, one layer at a time.

    Args:
        reference: the checkpoint.
        paths: name -> path of the artifact, in the reference's rounding of the residual stream.
        embedded: [windows, tokens, hidden], the embeddings of the windows' tokens.
        progress: told each layer that is done.
    """
    truth = reference.numerics.round16(embedded.to(reference.numerics.dtype))
    states = dict.fromkeys(paths, truth)
    errors: dict[str, list[tuple[float, ...]]] = {name: [] for name in paths}
    for index in range(reference.spec.num_layers):
        expected = reference.run_layer(index, truth)
        for name, path in paths.items():
            # Both at once: the layer's weights are dequantised once.
            fresh, carried = path.run_layer(index, torch.cat([truth, states[name]])).chunk(2)
            errors[name].append(
                tuple(measure(found, expected) for measure in (relative_rms, plain_rms) for found in (fresh, carried))
            )
            states[name] = carried
        truth = expected
        if progress is not None:
            progress(index)
    return {name: DepthErrors(*zip(*layers, strict=True)) for name, layers in errors.items()}


def relative_rms(found: Tensor, expected: Tensor) -> float:
    """Relative RMS error of residual streams [windows, tokens, hidden], each token measured by its own size.

    sqrt(mean over tokens of |found - expected|² / |expected|²). The first token of a window is often a thousand times
    as large as the others; the plain quotient of sums would see nothing but it.
    """
    error = (found - expected).double().square().sum(dim=-1)
    size = expected.double().square().sum(dim=-1)
    return math.sqrt((error / size.clamp_min(torch.finfo(torch.float64).tiny)).mean().item())


def plain_rms(found: Tensor, expected: Tensor) -> float:
    """Relative RMS error of all tokens together: |found - expected| / |expected|."""
    size = torch.linalg.vector_norm(expected.double()).item()
    return torch.linalg.vector_norm((found - expected).double()).item() / size if size > 0 else 0.0
