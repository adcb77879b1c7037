"""One safetensors file: its header checked, its tensors read with `pread` into memory of their own.

Mapping the file instead would count every page touched as resident memory of this process, up to the whole checkpoint.
The format: https://github.com/huggingface/safetensors (8 bytes of header length, JSON header, data).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fut_convert.errors import CheckpointError, ReadError
from fut_convert.sources.base import FLOAT_DTYPES, STORED_DTYPES, Problem, TensorInfo
from fut_convert.sources.read_errors import read_errors

#: Bits of one element; types that are not here are not measured (and not readable).
_DTYPE_BITS: dict[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}

#: The limit of the reference implementation; a longer header is garbage.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class _Extent:
    """Where a tensor's bytes are: absolute offset in the file, and length."""

    offset: int
    nbytes: int


class SafetensorsFile:
    """An open safetensors file.

    Attributes:
        name: its name within the checkpoint, for messages.
        tensors: what the header lists.
        problems: a file shorter or longer than its header says.

    Raises:
        CheckpointError: the header cannot be understood.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self.tensors: dict[str, TensorInfo] = {}
        self._extents: dict[str, _Extent] = {}
        try:
            self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ReadError(f"{name}: cannot be opened ({error.strerror})") from error
        try:
            with read_errors(name):
                self.problems = self._read_header()
        except BaseException:
            self.close()
            raise

    def read_rows(self, info: TensorInfo, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a tensor, [rows, ...] in its stored dtype.

        Raises:
            ReadError: the file ends too early or cannot be read.
            CheckpointError: its dtype is none of FLOAT_DTYPES.
        """
        return self._read(info, (stop - start, *info.shape[1:]), start * math.prod(info.shape[1:]), FLOAT_DTYPES)

    def read(self, info: TensorInfo) -> Tensor:
        """A whole tensor of any rank, in any of STORED_DTYPES; else as `read_rows`."""
        return self._read(info, info.shape, 0, STORED_DTYPES)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _read(self, info: TensorInfo, shape: tuple[int, ...], skip: int, readable: Mapping[str, torch.dtype]) -> Tensor:
        """The elements of a tensor from `skip` on that fill a shape."""
        dtype = readable.get(info.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{self.name}: {info.name} is stored as {info.dtype}; readable are {', '.join(readable)}"
            )
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel() == 0:
            return tensor
        octets = tensor.view(-1).view(torch.uint8).numpy().data.cast("B")
        self._read_into(octets, info.name, skip * dtype.itemsize)
        return tensor

    def _read_into(self, buffer: memoryview, tensor: str, skip: int) -> None:
        if self._descriptor is None:
            raise CheckpointError(f"{self.name}: already closed")
        offset, filled = self._extents[tensor].offset + skip, 0
        while filled < len(buffer):
            # One call reads at most 2 GiB, and may read less.
            with read_errors(self.name):
                count = os.preadv(self._descriptor, [buffer[filled:]], offset + filled)
            if count == 0:
                raise ReadError(
                    f"{self.name}: ends inside {tensor}, {len(buffer) - filled} bytes early; download the file again"
                )
            filled += count
        # Nobody reads it twice, and reading the next tensor into the same pages takes half the time of fresh ones.
        os.posix_fadvise(self._descriptor, offset, filled, os.POSIX_FADV_DONTNEED)

    def _read_header(self) -> list[Problem]:
        assert self._descriptor is not None
        size = os.fstat(self._descriptor).st_size
        start = os.pread(self._descriptor, 8, 0)
        if start == b"version ":
            raise CheckpointError(f"{self.name}: is a Git LFS pointer, not the weights; run `git lfs pull`")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > _MAX_HEADER_BYTES:
            raise CheckpointError(f"{self.name}: not a safetensors file ({size} bytes, no valid header)")
        if 8 + length > size:
            raise CheckpointError(
                f"{self.name}: has {size} bytes, fewer than its header of {8 + length}; download the file again"
            )
        try:
            header = json.loads(os.pread(self._descriptor, length, 8))
            if not isinstance(header, dict):
                raise TypeError("the header is not an object")
            header.pop("__metadata__", None)
            end = 8 + length
            for tensor, entry in header.items():
                end = max(end, self._add(str(tensor), entry, 8 + length))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{self.name}: its safetensors header cannot be read ({error})") from error
        if end > size:
            return [
                Problem(
                    "error",
                    f"{self.name}: truncated, has {size} bytes where its header says {end}; download the file again",
                )
            ]
        if end < size:
            return [
                Problem("error", f"{self.name}: has {size - end} bytes more than its header says; download it again")
            ]
        return []

    def _add(self, name: str, entry: dict[str, Any], data_start: int) -> int:
        """Enter one tensor of the header; returns the offset its bytes end at."""
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
        if begin < 0 or end < begin or any(n < 0 for n in shape):
            raise ValueError(f"{name}: offsets {begin}:{end}, shape {list(shape)}")
        bits = _DTYPE_BITS.get(dtype)
        if bits is not None and math.prod(shape) * bits // 8 != end - begin:
            raise ValueError(f"{name}: {dtype} {list(shape)} does not fill {end - begin} bytes")
        self.tensors[name] = TensorInfo(name, dtype, shape, end - begin, self.name)
        self._extents[name] = _Extent(data_start + begin, end - begin)
        return data_start + end
