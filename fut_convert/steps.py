"""Times the steps of a conversion."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepClock:
    """Adds up seconds by step: `with clock("read"): …`. Work on a CUDA device is waited for."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - started
