"""Reads the next layer's tensors from the checkpoint while a GPU works on this one's."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor

from fut_convert.sources import Source


class ReadAhead:
    """Loads tensors as the source does; those that were announced, in a thread of their own."""

    def __init__(self, source: Source, device: torch.device) -> None:
        """Read ahead for a CUDA device; a CPU has no core to spare for it."""
        self._source = source
        self._pool = ThreadPoolExecutor(1, "fut-read") if device.type == "cuda" else None
        self._coming: dict[str, Future[Tensor]] = {}

    def announce(self, layer: int) -> None:
        """Begin with the tensors of a layer, if there is such a layer."""
        if self._pool is not None:
            prefix = f"model.layers.{layer}."
            for name in self._source.tensors:
                if name.startswith(prefix):
                    self._coming[name] = self._pool.submit(self._source.load, name)

    def load(self, name: str) -> Tensor:
        """A tensor, see `Source.load`."""
        coming = self._coming.pop(name, None)
        return self._source.load(name) if coming is None else coming.result()

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
