"""Where calibration's activations go: on the device, in host memory or on the disk, within what may be used of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fut_convert.activation_store import PLACES
from fut_convert.calibration_text import CalibrationWindows
from fut_convert.device_memory import device_memory
from fut_convert.lanes import Lanes
from fut_convert.memory import available_bytes, estimate_host_bytes, job_bytes, report_bytes
from fut_convert.sources import Source
from fut_runtime.artifact.manifest import Manifest

#: Of memory that is free now, what is counted on where no budget is given: other processes use some, and the allocator
#: cannot use every byte.
_COUNTED_ON = 0.9


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes that a conversion may use: of the process's memory and of the device's; None for what is free."""

    host: int | None = None
    device: int | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """What a conversion will use.

    Attributes:
        place: where the activations of all calibration windows are kept, one of PLACES.
        activation_bytes: their size; 0 without calibration.
        host_bytes: estimated peak of the process's memory.
        host_limit: memory it may use.
        device_bytes: predicted peak of what PyTorch allocates on the CUDA device; None on a CPU.
        device_limit: what it may allocate there; None on a CPU.
        saved_bytes: what is saved of a layer that is done.
        device_steps: step -> its own peak, without the activations of all windows; empty on a CPU.
    """

    place: str
    activation_bytes: int
    host_bytes: int
    host_limit: int
    device_bytes: int | None
    device_limit: int | None
    device_steps: dict[str, int]
    saved_bytes: int

    @property
    def scratch_bytes(self) -> int:
        """Disk space that activations take until the artifact is sealed: kept there, and saved, old and new."""
        return 2 * self.saved_bytes + (self.activation_bytes if self.place == "disk" else 0)

    def problems(self) -> list[str]:
        """A warning for each memory that will not suffice."""
        messages = []
        if self.host_bytes > self.host_limit:
            messages.append(_too_little("memory", self.host_bytes, self.host_limit))
        if self.device_bytes is not None and self.device_limit is not None and self.device_bytes > self.device_limit:
            messages.append(_too_little("device memory", self.device_bytes, self.device_limit))
        return messages


def plan_memory(
    source: Source,
    manifest: Manifest,
    windows: CalibrationWindows | None,
    device: torch.device,
    budget: MemoryBudget,
    *,
    depth: CalibrationWindows | None = None,
    evaluation: CalibrationWindows | None = None,
    jobs: int = 1,
    processes: int = 1,
) -> MemoryPlan:
    """Place the activations in the fastest memory that has room for them beside everything else.

    `depth` and `evaluation` are what the report measures on. More than one of `jobs` are processes beside this one, and
    so are all but one of `processes`, which share the calibration windows.
    """
    shape = None if windows is None else (windows.ids.shape[0], windows.ids.shape[1])
    running = report_bytes(manifest, device, depth=depth, evaluation=evaluation)
    needed = device_memory(manifest, shape, device, running, processes)
    host_limit = budget.host if budget.host is not None else available_bytes()
    others = job_bytes(source, manifest, jobs)
    share = windows
    if windows is not None:
        processes = Lanes.processes(len(windows.ids), processes)
        share = CalibrationWindows(windows.ids[: Lanes(len(windows.ids), 0, processes).count], windows.record)
    # The other processes write nothing and report nothing, and have no more of anything else than the first.
    host = {
        place: others
        + estimate_host_bytes(source, manifest, share, device, place, depth=depth, evaluation=evaluation)
        + (processes - 1) * estimate_host_bytes(source, manifest, share, device, place)
        for place in PLACES
    }
    device_limit = None
    places = ["device", "disk"]
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0])
        device_limit = budget.device if budget.device is not None else free
        places = ["device", "host", "disk"]
        if needed.peak("device") > (device_limit if budget.device is not None else _COUNTED_ON * free):
            places.remove("device")
    counted_on = host_limit if budget.host is not None else _COUNTED_ON * host_limit
    fitting = [place for place in places if host[place] <= counted_on]
    place = (fitting or ["disk"])[0] if windows is not None else "device"
    # On the disk there is room for those of all processes.
    whole = device_memory(manifest, shape, device)
    return MemoryPlan(
        place=place,
        activation_bytes=whole.activation_bytes,
        host_bytes=host[place],
        host_limit=host_limit,
        device_bytes=needed.peak(place) if device.type == "cuda" else None,
        device_limit=device_limit,
        device_steps=dict(needed.steps) if device.type == "cuda" else {},
        saved_bytes=whole.resident,
    )


def _too_little(what: str, needed: int, limit: int) -> str:
    return f"the conversion needs about {needed / 1e9:.1f} GB of {what}, and {limit / 1e9:.1f} GB are free"
