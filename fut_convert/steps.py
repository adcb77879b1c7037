"""Times the steps of a conversion, and sees how much memory is in use while they run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

import psutil
import torch

#: Seconds between two looks at the process's memory, and the least between two at the ends of steps: blocks of rows
#: take milliseconds, and a look tens of microseconds in which other threads wait.
_SAMPLE_S = 0.05
_LEAST_S = 0.01


class StepClock:
    """Adds up seconds by step: `with clock("read"): …`, in any thread. Work on a CUDA device is waited for.

    Memory is that of the whole process while a step ran, so steps that run side by side share their peaks. On the host
    it is sampled: every 50 ms, and at a step's ends unless that was done within 10 ms. On a CUDA device the allocator's
    own peak is taken. Leaving the clock as a context manager ends the sampling.

    Attributes:
        seconds: by step, summed over the threads.
        peak_bytes: by step, the largest resident set.
        peak_device_bytes: by step, the most that PyTorch had allocated on the CUDA device; empty elsewhere.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}
        self.peak_device_bytes: dict[str, int] = {}
        self._device = device
        self._process = psutil.Process()
        self._started = time.perf_counter()
        self._lock = threading.Lock()
        self._running: dict[str, int] = {}
        self._device_peak = 0
        self._looked = 0.0
        self._ended = threading.Event()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._sampler = threading.Thread(target=self._sample, name="fut-convert-memory", daemon=True)
        self._sampler.start()

    def __enter__(self) -> StepClock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._sampler.join()

    @property
    def elapsed(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._started

    @property
    def device_peak(self) -> int | None:
        """Most bytes allocated on the CUDA device so far, inside steps and between them; None elsewhere."""
        if self._device.type != "cuda":
            return None
        with self._lock:
            self._look()
            return self._device_peak

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add seconds by step that another process took."""
        with self._lock:
            for step, taken in seconds.items():
                self.seconds[step] = self.seconds.get(step, 0.0) + taken

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        started = time.perf_counter()
        with self._lock:
            self._look()
            self._running[step] = self._running.get(step, 0) + 1
            self._look()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            with self._lock:
                self._look()
                self._running[step] -= 1
                self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - started

    def _look(self) -> None:
        """Count the memory in use now, and the device's peak since the last look, for every step that runs."""
        active = [step for step, count in self._running.items() if count]
        now = time.perf_counter()
        if active and (now - self._looked >= _LEAST_S or any(step not in self.peak_bytes for step in active)):
            self._looked = now
            resident = int(self._process.memory_info().rss)
            for step in active:
                self.peak_bytes[step] = max(self.peak_bytes.get(step, 0), resident)
        if self._device.type != "cuda":
            return
        allocated = torch.cuda.max_memory_allocated(self._device)
        self._device_peak = max(self._device_peak, allocated)
        for step in active:
            self.peak_device_bytes[step] = max(self.peak_device_bytes.get(step, 0), allocated)
        torch.cuda.reset_peak_memory_stats(self._device)

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            with self._lock:
                self._look()
