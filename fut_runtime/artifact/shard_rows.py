"""Rows of tensors into shards that another process has made and looks after."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from fut_runtime.artifact.layout import all_tensors
from fut_runtime.artifact.manifest import Manifest
from fut_runtime.artifact.shard_writer import write_all
from fut_runtime.artifact.shards import TensorPlace, plan_shards
from fut_runtime.artifact.staging import os_errors


class ShardRows:
    """Writes to the shards of an `ArtifactWriter` in another process, which is told what has been written."""

    def __init__(self, base: Path, manifest: Manifest, max_shard_bytes: int) -> None:
        """Write to the shards in `base`; the rest as the writer has it."""
        self._base = base
        self._descriptors: dict[str, int] = {}
        self._places: dict[str, tuple[str, TensorPlace]] = {
            place.spec.name: (shard.name, place)
            for shard in plan_shards(all_tensors(manifest), max_shard_bytes)
            for place in shard.tensors
        }
        for name in {shard for shard, _ in self._places.values()}:
            with os_errors(base / name, "cannot be opened"):
                self._descriptors[name] = os.open(base / name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def write_rows(self, name: str, start: int, rows: Tensor) -> None:
        """As `ArtifactWriter.write_rows`, which checks what this takes for granted.

        Raises:
            ArtifactError: the disk refuses.
        """
        shard, place = self._places[name]
        raw = rows.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        with os_errors(self._base / shard, f"tensor {name} cannot be written"):
            offset = place.offset + start * (place.spec.nbytes // place.spec.shape[0])
            write_all(self._descriptors[shard], raw.numpy().data, offset)
