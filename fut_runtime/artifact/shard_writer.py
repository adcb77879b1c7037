"""Writes one safetensors file whose tensors arrive in any order."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from fut_runtime.artifact.shards import Shard, TensorPlace
from fut_runtime.artifact.staging import os_errors


class OpenShard:
    """A shard that is being written: its file, and how far it is written without a gap."""

    def __init__(self, shard: Shard, directory: Path, written: Collection[str] = ()) -> None:
        """Create the file, or go on with one that holds the tensors `written` already.

        Raises:
            ArtifactError: the file system refuses, or the file is not the one that holds them.
        """
        self.path = directory / shard.name
        self.shard = shard
        self.written: set[str] = set()
        present = [place for place in shard.tensors if place.spec.name in written]
        with os_errors(self.path, "cannot be created"):
            anew = os.O_TRUNC if not present else 0
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | anew | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            end = max((place.offset + place.spec.nbytes for place in present), default=0)
            if os.fstat(self.descriptor).st_size < end:
                raise OSError(f"ends before byte {end}; the file was changed, start over")
            write_all(self.descriptor, memoryview(shard.header), 0)
        self.front = len(shard.header)
        self._next = 0
        for place in present:
            self.advance(place.spec.name)

    @property
    def beyond_gap(self) -> str | None:
        """The first tensor that is written although one before it is not."""
        return next((p.spec.name for p in self.shard.tensors[self._next :] if p.spec.name in self.written), None)

    def write(self, place: TensorPlace, tensor: Tensor, skip_bytes: int = 0) -> None:
        """Write one tensor's bytes, or some of them from `skip_bytes` on."""
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        with os_errors(self.path, f"tensor {place.spec.name} ({place.spec.nbytes} bytes) cannot be written"):
            write_all(self.descriptor, raw.numpy().data, place.offset + skip_bytes)

    def advance(self, name: str) -> None:
        """Count a tensor as written and move the front over what is written without a gap."""
        self.written.add(name)
        while self._next < len(self.shard.tensors) and self.shard.tensors[self._next].spec.name in self.written:
            after = self.shard.tensors[self._next]
            self.front = after.offset + after.spec.nbytes
            self._next += 1

    def flush(self) -> None:
        """Wait until everything written is on the disk."""
        with os_errors(self.path, "cannot be flushed"):
            os.fdatasync(self.descriptor)

    def close(self) -> None:
        """Close the file; does nothing the second time."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write bytes to a place in a file, in as many calls as it takes."""
    while data:
        count = os.pwrite(descriptor, data[: 1 << 30], offset)
        data, offset = data[count:], offset + count
