"""Calibration windows shared out over several processes of one host: `fut-convert --calibration-processes`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
import torch.distributed as dist

from fut_convert.calibration_process import CalibrationSetup, join
from fut_convert.child_process import ChildProcess
from fut_convert.errors import ConvertError

_TITLE = "--calibration-processes"


class SharedCalibration:
    """The other processes, each with its share of the windows and a device of its own."""

    def __init__(self, setup: CalibrationSetup, inherited: tuple[int, ...]) -> None:
        """Start them and wait until all have come together.

        Args:
            setup: that of the first process, which is this one.
            inherited: descriptors that they hold as long as they live.

        Raises:
            JobError: one of them cannot be started, or died.
            FutError: it cannot read the checkpoint.
        """
        if dist.is_initialized():
            raise ConvertError(
                f"{_TITLE} starts its own processes, but torch.distributed is in use in this one: not under torchrun"
            )
        self._processes: list[ChildProcess] = []
        self._failed = False
        try:
            for rank in range(1, setup.processes):
                process = ChildProcess("calibration_process", _TITLE, inherited)
                self._processes.append(process)
                process.send(replace(setup, rank=rank, device=device_of(setup.device, rank)))
            for process in self._processes:
                process.receive()
            with self.working():
                join(setup)
        except BaseException:
            self._failed = True
            self.close()
            raise

    def tell(self, command: str, layer: int = 0) -> None:
        """Have all of them take part: in a `layer`, in the `head`, or in what the first process is to `save`."""
        for process in self._processes:
            process.send((command, layer))

    @contextmanager
    def working(self) -> Iterator[None]:
        """While this process works with them: what ends one of them is what is raised here."""
        try:
            yield
        except RuntimeError:
            # Of torch.distributed, which says no more than that a connection ended.
            self._failed = True
            for process in self._processes:
                if process.connection.poll(1):
                    process.receive()
            raise
        except BaseException:
            self._failed = True
            raise

    def close(self) -> None:
        """End them; does nothing the second time."""
        for process in self._processes:
            process.stop(kill=self._failed)
        self._processes = []
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()


def device_of(device: str, rank: int) -> str:
    """The device of a process: CUDA devices are counted from that of the first on."""
    first = torch.device(device)
    return device if first.type == "cpu" else f"cuda:{(first.index or 0) + rank}"
