"""Safetensors files: which tensor goes into which shard, their headers, and reading headers of any origin."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fut_runtime.artifact.json_text import canonical, parse_object
from fut_runtime.artifact.layout import DTYPE_BYTES, TensorSpec
from fut_runtime.artifact.paths import shard_name
from fut_runtime.errors import ArtifactError

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
#: Tensor data start at a multiple of this: the header is padded with spaces, which the format allows.
DATA_ALIGN = 4096
#: Default size limit of a shard: what every host of models accepts as one file.
MAX_SHARD_BYTES = 5_000_000_000
#: The limit of the safetensors library.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorPlace:
    """A tensor and the byte of its file at which its data begin."""

    spec: TensorSpec
    offset: int


@dataclass(frozen=True)
class Shard:
    """One safetensors file: name, header (length prefix included), and its tensors in file order."""

    name: str
    header: bytes
    tensors: tuple[TensorPlace, ...]

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        last = self.tensors[-1]
        return last.offset + last.spec.nbytes


def plan_shards(specs: Sequence[TensorSpec], max_shard_bytes: int) -> list[Shard]:
    """Distribute tensors over shards, in order, each at most `max_shard_bytes` unless one tensor alone is larger."""
    groups: list[list[TensorSpec]] = []
    room = -1
    for spec in specs:
        cost = spec.nbytes + len(spec.name) + 160  # 160: more than the rest of a tensor's header entry
        if cost > room:
            groups.append([])
            room = max_shard_bytes - 2 * DATA_ALIGN
        groups[-1].append(spec)
        room -= cost
    return [_shard(shard_name(i, len(groups)), group) for i, group in enumerate(groups)]


def _shard(name: str, specs: Iterable[TensorSpec]) -> Shard:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    relative: list[tuple[TensorSpec, int]] = []
    end = 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.nbytes],
        }
        relative.append((spec, end))
        end += spec.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    data_start = -(-(8 + len(text)) // DATA_ALIGN) * DATA_ALIGN
    header = struct.pack("<Q", data_start - 8) + text.ljust(data_start - 8)
    return Shard(name, header, tuple(TensorPlace(spec, data_start + offset) for spec, offset in relative))


def index_text(shards: Sequence[Shard]) -> str:
    """`model.safetensors.index.json` of these shards."""
    weight_map = {place.spec.name: shard.name for shard in shards for place in shard.tensors}
    total = sum(place.spec.nbytes for shard in shards for place in shard.tensors)
    return canonical({"metadata": {"total_size": total}, "weight_map": weight_map})


def read_header(path: Path, *, allow_truncated: bool = False) -> list[TensorPlace]:
    """Tensors of a safetensors file in the order of their data.

    `allow_truncated`: do not compare the header with the size of the data, to find out what a damaged file held.

    Raises:
        ArtifactError: the file cannot be read, is truncated, or its header is not that of a whole safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise ArtifactError(
                    f"{path}: header length {length} in a file of {size} bytes; the file is truncated or no safetensors"
                )
            text = file.read(length)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from error
    data_bytes = None if allow_truncated else size - 8 - length
    return parse_header(text, data_bytes, str(path), data_start=8 + length)


def parse_header(text: bytes, data_bytes: int | None, where: str, *, data_start: int = 0) -> list[TensorPlace]:
    """Check a safetensors header against the number of data bytes that follow it.

    Args:
        text: the JSON header without its length prefix.
        data_bytes: bytes of the file after the header; None does not compare them.
        where: file name for messages.
        data_start: byte of the file at which the data begin; added to the offsets returned.

    Raises:
        ArtifactError: anything but tensors of known types that cover the data without gap or overlap.
    """
    entries = parse_object(text, f"{where}: header")
    entries.pop("__metadata__", None)
    places = sorted((_entry(name, entry, where) for name, entry in entries.items()), key=lambda p: p.offset)
    end = 0
    for place in places:
        if place.offset != end:
            raise ArtifactError(
                f"{where}: tensor {place.spec.name!r} begins at data byte {place.offset}, expected {end}; "
                "the header is damaged"
            )
        end += place.spec.nbytes
    if data_bytes is not None and end != data_bytes:
        raise ArtifactError(
            f"{where}: {data_bytes} bytes of data, expected {end} from the header; the file is truncated or damaged"
        )
    return [TensorPlace(p.spec, data_start + p.offset) for p in places]


def _entry(name: str, entry: Any, where: str) -> TensorPlace:
    place = f"{where}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ArtifactError(f"{place}: header entry is not an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ArtifactError(f"{place}: dtype {dtype!r}, expected one of {sorted(DTYPE_BYTES)}")
    if not isinstance(shape, list) or not all(type(n) is int and 0 < n < 1 << 40 for n in shape) or len(shape) > 8:
        raise ArtifactError(f"{place}: shape {str(shape)[:100]}, expected up to 8 positive sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        raise ArtifactError(f"{place}: data_offsets {str(offsets)[:100]}, expected two byte offsets")
    nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise ArtifactError(
            f"{place}: data_offsets span {offsets[1] - offsets[0]} bytes, expected {nbytes} for {dtype} {shape}"
        )
    return TensorPlace(TensorSpec(name, dtype, tuple(shape)), offsets[0])
