"""Going on where an interrupted conversion stopped: what must be equal for that, how often to save, what is kept."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fut_convert.sources import Source
from fut_runtime.artifact.manifest import Manifest
from fut_runtime.artifact.progress import read_progress
from fut_runtime.artifact.staging import staging_path

#: Key of the saved state: layers that are done, and of how many; the head comes after them.
LAYERS_DONE = "layers_done"
LAYERS = "layers"
#: Share of a conversion's time that saving its progress may take.
_SAVING_SHARE = 0.05


def conversion_inputs(source: Source, manifest: Manifest, device: torch.device) -> dict[str, Any]:
    """What the sealed bytes depend on, JSON-ready: manifest (recipe, versions, texts), checkpoint files, and processor.

    Other processors add up in another order, so a conversion that changed hands in the middle would be neither's.
    What branch or tag led to a commit does not matter: a branch may have moved on since.
    """
    inputs = json.loads(manifest.to_json())
    if "commit" in inputs["source"]:
        del inputs["source"]["revision"]
    return {
        **inputs,
        "checkpoint": dict(sorted(source.file_stamps().items())),
        "processor": _processor(device),
    }


class SavePace:
    """Says when progress is worth saving: after every layer, unless that takes more than a twentieth of the time."""

    def __init__(self) -> None:
        self._cost = 0.0
        self._since = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether what would be lost now is worth what saving it costs."""
        return (time.monotonic() - self._since) * _SAVING_SHARE >= self._cost

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Wraps the saving, which tells how long it takes."""
        started = time.monotonic()
        yield
        self._since = time.monotonic()
        self._cost = self._since - started


def kept_progress(out: Path) -> str | None:
    """What an interrupted conversion into `out` has left for a later one, for a message; None for nothing."""
    place = staging_path(out)
    progress = read_progress(place)
    if progress is None:
        return None
    done, layers = progress.state.get(LAYERS_DONE), progress.state.get(LAYERS)
    return f"{place.name} keeps {done} of {layers} layers: the same command goes on from there"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, Triton {_version('triton')}"
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}"
