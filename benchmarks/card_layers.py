"""A decoder layer on the card, put together from the library's single operations, so that each layer can be given the
same input as the reference's and its residual stream and cache be looked at."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fut_runtime.artifact.layout import NORM_OF_MODULE
from fut_runtime.artifact.manifest import KVCacheSpec
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.spec import MODULES
from fut_runtime.cuda.memory_plan import MAX_ROWS
from fut_runtime.cuda.operations import DeviceMatrix, PagedCache, attention, project
from fut_runtime.cuda.pages import pages_for
from fut_runtime.cuda.structs import Epilogue
from fut_runtime.rope import rope_tables


class CardLayer:
    """Layer `index` of an artifact with weights of one format, and a cache for one request."""

    def __init__(
        self, artifact: Artifact, index: int, weight_format: str, cache: KVCacheSpec, tokens: int, device: torch.device
    ) -> None:
        self._model = artifact.manifest.model
        self._matrices = {module: _matrix(artifact, index, module, weight_format, device) for module in MODULES}
        names = (f"layers.{index}.{norm}_norm" for norm in ("q", "k"))
        self._norms = [artifact.tensor(name).to(device) if artifact.has(name) else None for name in names]
        model, pages = self._model, pages_for(tokens)
        self.cache = PagedCache.empty(
            cache, pages=pages, layers=1, kv_heads=model.num_kv_heads, head_dim=model.head_dim, device=device
        )
        # Backwards, so that pages do not follow one another by accident.
        self.pages = torch.arange(pages - 1, -1, -1, dtype=torch.int32, device=device)[None]
        self._rope = tuple(table.contiguous().to(device) for table in rope_tables(model, torch.arange(tokens), tokens))

    def run(self, h: Tensor) -> Tensor:
        """The residual stream BF16 [tokens, hidden] behind the layer, from that before it; positions begin at 0."""
        parts = []
        for first in range(0, len(h), MAX_ROWS):
            rows = h[first : first + MAX_ROWS].clone()
            parts.append(self._step(rows, torch.arange(first, first + len(rows), dtype=torch.int32, device=h.device)))
        return torch.cat(parts)

    def _step(self, h: Tensor, positions: Tensor) -> Tensor:
        eps, matrices = self._model.rms_norm_eps, self._matrices
        q_norm, k_norm = self._norms
        attended = attention(
            self.cache, 0, project(matrices["qkv"], h, eps=eps), positions, torch.zeros_like(positions), self.pages,
            (self._rope[0], self._rope[1]), q_norm=q_norm, k_norm=k_norm, eps=eps, chunked=True,
        )  # fmt: skip
        project(matrices["o"], attended, Epilogue.RESIDUAL, y=h)
        gated = project(matrices["gate_up"], h, Epilogue.SWIGLU, eps=eps)
        return project(matrices["down"], gated, Epilogue.RESIDUAL, y=h)


def _matrix(artifact: Artifact, index: int, module: str, weight_format: str, device: torch.device) -> DeviceMatrix:
    matrix = DeviceMatrix.of(artifact, f"layers.{index}.{module}", weight_format, device)
    if matrix.spec.gain != "runtime" or module not in NORM_OF_MODULE:
        return matrix
    return replace(matrix, gain=artifact.tensor(f"layers.{index}.{NORM_OF_MODULE[module]}").to(device))
