"""Times the steps of a conversion."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepClock:
    """Adds up seconds by step: `with clock("read"): …`, in any thread. Work on a CUDA device is waited for.

    Attributes:
        seconds: by step, summed over the threads.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device
        self._started = time.perf_counter()
        self._lock = threading.Lock()

    @property
    def elapsed(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._started

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            with self._lock:
                self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - started
