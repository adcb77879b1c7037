"""The header of a safetensors file, checked: which tensors it lists, and where their bytes are.

The format: https://github.com/huggingface/safetensors (8 bytes of header length, JSON header, data).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fut_convert.errors import CheckpointError, ReadError
from fut_convert.sources.base import FLOAT_DTYPES, STORED_DTYPES, Problem, TensorInfo
from fut_runtime.artifact.json_text import excerpt, strict_json

#: Bits of one element; types that are not here are not measured (and not readable).
_DTYPE_BITS: dict[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}

#: The limit of the reference implementation; a longer header is garbage.
_MAX_HEADER_BYTES = 100_000_000

#: More dimensions than any tensor has, and more bytes than any file.
_MAX_DIMENSIONS = 16
_MAX_BYTES = 1 << 60

#: Bytes that are read at first: of most files the whole header.
_FIRST_BYTES = 1 << 16


@dataclass
class SafetensorsHeader:
    """What a header says.

    Attributes:
        tensors: what it lists.
        offsets: where the bytes of each begin in the file.
        problems: a file shorter or longer than its header says.
        size: bytes of the file.
    """

    size: int
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


class SafetensorsReader(ABC):
    """The tensors of a safetensors file, wherever its bytes are.

    Attributes:
        name: its name within the checkpoint, for messages.
        header: what it holds.
    """

    def __init__(self, name: str, header: SafetensorsHeader) -> None:
        self.name = name
        self.header = header

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What the header lists."""
        return self.header.tensors

    @property
    def problems(self) -> list[Problem]:
        """A file shorter or longer than its header says."""
        return self.header.problems

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

    @abstractmethod
    def read_into(self, buffer: memoryview, tensor: str, skip: int) -> None:
        """Fill a buffer with the bytes of a tensor from `skip` on.

        Raises:
            ReadError: the file ends too early or cannot be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    def _read(self, info: TensorInfo, shape: tuple[int, ...], skip: int, readable: Mapping[str, torch.dtype]) -> Tensor:
        """The elements of a tensor from `skip` on that fill a shape."""
        dtype = readable.get(info.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{self.name}: {info.name} is stored as {info.dtype}; readable are {', '.join(readable)}"
            )
        begin = self.header.offsets[info.name] + skip * dtype.itemsize
        missing = begin + math.prod(shape) * dtype.itemsize - self.header.size
        if missing > 0:  # before memory is taken for what a damaged header promises
            raise ReadError(f"{self.name}: ends inside {info.name}, {missing} bytes early; download the file again")
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            self.read_into(tensor.view(-1).view(torch.uint8).numpy().data.cast("B"), info.name, skip * dtype.itemsize)
        return tensor


def read_header(name: str, size: int, read: Callable[[int, int], bytes]) -> SafetensorsHeader:
    """The header of a file of `size` bytes; read(offset, length) gives some of them, fewer where it ends.

    Raises:
        CheckpointError: it cannot be understood.
    """
    first = read(0, min(size, _FIRST_BYTES))
    start = first[:8]
    if start == b"version ":
        raise CheckpointError(f"{name}: is a Git LFS pointer, not the weights; run `git lfs pull`")
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > _MAX_HEADER_BYTES:
        raise CheckpointError(f"{name}: not a safetensors file ({size} bytes, no valid header)")
    if 8 + length > size:
        raise CheckpointError(
            f"{name}: has {size} bytes, fewer than its header of {8 + length}; download the file again"
        )
    text = first[8 : 8 + length]
    if len(text) < length:
        text += read(len(first), 8 + length - len(first))
    header = SafetensorsHeader(size)
    try:
        listed = strict_json(text, constants=False)
        if not isinstance(listed, dict):
            raise TypeError("the header is not an object")
        listed.pop("__metadata__", None)
        for tensor, entry in listed.items():
            _add(header, name, str(tensor), entry, 8 + length)
        end = _end(header, 8 + length)
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{name}: its safetensors header cannot be read ({error})") from error
    if end > size:
        message = f"truncated, has {size} bytes where its header says {end}; download the file again"
        header.problems.append(Problem("error", f"{name}: {message}"))
    if end < size:
        message = f"has {size - end} bytes more than its header says; download it again"
        header.problems.append(Problem("error", f"{name}: {message}"))
    return header


def _add(header: SafetensorsHeader, file: str, name: str, entry: dict[str, Any], data_start: int) -> None:
    """Enter one tensor of the header."""
    dtype, shape, offsets = entry["dtype"], _sizes(entry["shape"]), _sizes(entry["data_offsets"])
    if not isinstance(dtype, str) or len(offsets) != 2:
        raise ValueError(f"{name}: dtype {excerpt(dtype)}, offsets {list(offsets)}")
    if math.prod(max(n, 1) for n in shape) >= _MAX_BYTES:
        raise ValueError(f"{name}: shape {excerpt(list(shape))} is more than any file holds")
    begin, end = offsets
    if end < begin:
        raise ValueError(f"{name}: offsets {begin}:{end}, shape {list(shape)}")
    bits = _DTYPE_BITS.get(dtype)
    if bits is not None and math.prod(shape) * bits // 8 != end - begin:
        raise ValueError(f"{name}: {dtype} {list(shape)} does not fill {end - begin} bytes")
    header.tensors[name] = TensorInfo(name, dtype, shape, end - begin, file)
    header.offsets[name] = data_start + begin


def _end(header: SafetensorsHeader, data_start: int) -> int:
    """The offset that the data end at, which the tensors fill one after another, as the format demands."""
    end = data_start
    for info in sorted(header.tensors.values(), key=lambda info: (header.offsets[info.name], info.nbytes)):
        begin = header.offsets[info.name]
        if begin != end:
            raise ValueError(
                f"{info.name} begins at byte {begin} of the file, expected {end}, where those before it end"
            )
        end += info.nbytes
    return end


def _sizes(value: Any) -> tuple[int, ...]:
    """A list of sizes or offsets."""
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"found {excerpt(value)}, expected up to {_MAX_DIMENSIONS} whole numbers")
    if any(n >= _MAX_BYTES for n in value):
        raise ValueError(f"{excerpt(value)} is more than any file holds")
    return tuple(value)
