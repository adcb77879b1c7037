"""One GGUF file: its metadata and tensor table parsed, its tensors read by rows and dequantized.

Only the header is parsed here, from a buffered stream, because the `gguf` package's reader maps the whole file and
makes an array object of every token; block formats are decoded by that package's `dequantize`.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize
from torch import Tensor

from fut_convert.errors import CheckpointError, ReadError
from fut_convert.sources.base import FLOAT_DTYPES, Problem
from fut_convert.sources.gguf_metadata import check_types
from fut_convert.sources.read_errors import read_errors
from fut_runtime.artifact.paths import plain_name

#: Stored types that are read. Ternary ones and those of four-bit floating point are left out.
READABLE_TYPES: frozenset[str] = frozenset(
    {
        *FLOAT_DTYPES,
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
        *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    }
)

_VERSIONS = (2, 3)
#: Ten times the vocabulary of any model; what it says may take thirty times as much memory as it does in the file.
_MAX_HEADER_BYTES = 100_000_000
#: Depth of arrays in arrays; the format's own keys have none.
_MAX_NESTING = 8
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4

_SCALARS: dict[int, str] = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}

#: Elements dequantized at a time; more only makes the temporaries bigger.
_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor as the file stores it: `shape` outermost first, `offset` absolute, `type` by its GGUF name."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file.

    Attributes:
        name: file name, for messages.
        metadata: key -> value; arrays are lists.
        tensors: the tensor table by name.
        problems: a file that ends before its tensors do.

    Raises:
        CheckpointError: not GGUF, an unknown version, or a header that cannot be parsed.
    """

    def __init__(self, path: Path) -> None:
        self.name = plain_name(path.name)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        self.problems: list[Problem] = []
        self._taken = 0
        try:
            self._file: BinaryIO | None = path.open("rb")
        except OSError as error:
            raise ReadError(f"{self.name}: cannot be opened ({error.strerror})") from error
        self._size = os.fstat(self._file.fileno()).st_size
        try:
            with read_errors(self.name):
                self._parse()
        except (ValueError, KeyError, OverflowError, UnicodeDecodeError) as error:
            self.close()
            raise CheckpointError(f"{self.name}: its GGUF header cannot be parsed ({error})") from error
        except BaseException:
            self.close()
            raise

    def read_rows(self, tensor: GGUFTensor, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop`: in the stored type for F32, F16 and BF16, dequantized to float32 for others.

        Raises:
            CheckpointError: the file ends too early, or the type is not among READABLE_TYPES.
        """
        if tensor.type not in READABLE_TYPES:
            readable = ", ".join(sorted(READABLE_TYPES))
            raise CheckpointError(f"{self.name}: {tensor.name} is stored as {tensor.type}; readable are {readable}")
        if len(tensor.shape) == 1:
            # A vector is one row of blocks, which cannot be cut anywhere.
            return self._read_matrix(tensor, 1, tensor.shape[0], 0, 1)[0, start:stop].clone()
        columns = math.prod(tensor.shape[1:])
        return self._read_matrix(tensor, tensor.shape[0], columns, start, stop).reshape(-1, *tensor.shape[1:])

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read_matrix(self, tensor: GGUFTensor, rows: int, columns: int, start: int, stop: int) -> Tensor:
        row_bytes = tensor.nbytes // rows
        if tensor.offset + stop * row_bytes > self._size:  # before memory is taken for what a damaged header promises
            raise ReadError(f"{self.name}: ends inside {tensor.name}; download the file again")
        dtype = FLOAT_DTYPES.get(tensor.type)
        out = torch.empty((stop - start, columns), dtype=dtype or torch.float32)
        if dtype is not None:
            if out.numel():
                self._read_into(out.view(torch.uint8).numpy().data.cast("B"), tensor, start * row_bytes)
            return out
        step = max(1, _CHUNK_ELEMENTS // columns)
        for row in range(start, stop, step):
            raw = np.empty((min(step, stop - row), row_bytes), dtype=np.uint8)
            self._read_into(raw.data.cast("B"), tensor, row * row_bytes)
            values = dequantize(raw, GGMLQuantizationType[tensor.type])
            out[row - start : row - start + len(raw)] = torch.from_numpy(values)
        return out

    def _read_into(self, buffer: memoryview, tensor: GGUFTensor, skip: int) -> None:
        if self._file is None:
            raise CheckpointError(f"{self.name}: already closed")
        filled = 0
        while filled < len(buffer):
            with read_errors(self.name):
                count = os.preadv(self._file.fileno(), [buffer[filled:]], tensor.offset + skip + filled)
            if count == 0:
                raise ReadError(f"{self.name}: ends inside {tensor.name}; download the file again")
            filled += count

    def _parse(self) -> None:
        magic = self._take(4)
        if magic != b"GGUF":
            raise CheckpointError(f"{self.name}: not a GGUF file (it begins with {magic!r})")
        version = self._number("<I")
        if version & 0xFFFF == 0:
            raise CheckpointError(f"{self.name}: is a big-endian GGUF file; only little-endian ones are read")
        if version not in _VERSIONS:
            raise CheckpointError(f"{self.name}: GGUF version {version} is not supported; supported are {_VERSIONS}")
        tensor_count, key_count = self._number("<Q"), self._number("<Q")
        for _ in range(key_count):
            key = self._string()
            self.metadata[key] = self._value(self._number("<I"))
        table = [self._table_entry() for _ in range(tensor_count)]
        check_types(self.metadata)
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if alignment < 1:
            raise ValueError(f"general.alignment is {alignment}")
        start = -(-self._taken // alignment) * alignment
        for tensor in table:
            placed = GGUFTensor(tensor.name, tensor.type, tensor.shape, start + tensor.offset, tensor.nbytes)
            if tensor.name in self.tensors:
                raise ValueError(f"{tensor.name} is listed twice")
            self.tensors[tensor.name] = placed
        end = max((t.offset + t.nbytes for t in self.tensors.values()), default=0)
        if end > self._size:
            self.problems.append(
                Problem(
                    "error",
                    f"{self.name}: truncated, has {self._size} bytes where its tensors need {end}; "
                    "download the file again",
                )
            )

    def _table_entry(self) -> GGUFTensor:
        """One entry of the tensor table; its offset is still relative to the data."""
        name = self._string()
        dimensions = self._number("<I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]
        type_number = self._number("<I")
        try:
            kind = GGMLQuantizationType(type_number)
        except ValueError as error:
            raise CheckpointError(
                f"{self.name}: {name} is stored as type {type_number}, unknown to this version of the gguf package"
            ) from error
        block, size = GGML_QUANT_SIZES[kind]
        if 0 in shape:
            raise ValueError(f"{name} has shape {list(shape)}")
        if shape[-1] % block:
            raise ValueError(f"{name}: rows of {shape[-1]} do not hold whole {kind.name} blocks of {block}")
        return GGUFTensor(name, kind.name, shape, self._number("<Q"), math.prod(shape) // block * size)

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != GGUFValueType.ARRAY:
            raise ValueError(f"a value of unknown type {kind}")
        if depth == _MAX_NESTING:
            raise ValueError(f"arrays are nested more than {_MAX_NESTING} deep")
        item, count = self._number("<I"), self._number("<Q")
        if item in _SCALARS:
            code = _SCALARS[item]
            raw = self._take(count * struct.calcsize(code))
            return list(struct.unpack(f"<{count}{code[1]}", raw))
        read: Callable[[], Any] = self._string if item == GGUFValueType.STRING else lambda: self._value(item, depth + 1)
        return [read() for _ in range(count)]

    def _string(self) -> str:
        return self._take(self._number("<Q")).decode("utf-8")

    def _number(self, code: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def _take(self, count: int) -> bytes:
        assert self._file is not None
        # A damaged length must not become an allocation of its size. The file's own `tell` would triple the time.
        self._taken += count
        if _MAX_HEADER_BYTES < self._taken <= self._size:
            raise ValueError(f"it has more than {_MAX_HEADER_BYTES} bytes")
        data = self._file.read(count) if self._taken <= self._size else b""
        if len(data) < count:
            raise CheckpointError(
                f"{self.name}: truncated or damaged, ends within its header ({self._size} bytes); download it again"
            )
        return data


def shortest_decimal(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 was 1e-5 before it was stored."""
    return float(str(np.float32(value)))
