"""GGUF files from parts that need not be valid: any value under any key, any shape, type and offset of a tensor."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from random import Random
from typing import Any

from fuzzing.mutations import NAMES, SIZES, random_bytes

_UINT8, _INT32, _BOOL, _STRING, _ARRAY, _INT64, _FLOAT64 = 0, 5, 7, 8, 9, 11, 12
_ALIGNMENT = 32

#: Values that stand where another is expected.
_VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2**31, 2**62, 0.0, -1.0, 1e-30, 3e38, float("nan"), float("inf"), True, False, "", "x", "none"),
    *([], [0], [1, 2], [-1], [0.5, float("nan")], ["a", "a"], [""], [True], [[1], [2]], [[]], ["a b", "b"]),
    *(["x" * 3000] * 3, "{{ messages }}", "x" * 100_000),
)


@dataclass(frozen=True)
class Entry:
    """An entry of the tensor table, `shape` innermost first as the file has it."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


def damage_metadata(random: Random, metadata: dict[str, Any]) -> dict[str, Any]:
    """Metadata with one to three values changed, in part or as a whole, or left out."""
    changed = dict(metadata)
    for _ in range(random.randrange(1, 4)):
        key = random.choice(list(changed))
        value = changed[key]
        kind = random.randrange(4)
        if kind == 0:
            del changed[key]
        elif kind == 1 and isinstance(value, list) and value:
            items = list(value)
            # What is odd keeps the type of the list, as it does in a file.
            odd = [v for v in (*_VALUES, *NAMES) if type(v) is type(items[0])]
            items[random.randrange(len(items))] = random.choice(odd)
            changed[key] = items if random.random() < 0.8 else items[: random.randrange(len(items))]
        else:
            changed[key] = random.choice(_VALUES)
    return changed


def damage_table(random: Random, table: list[Entry]) -> list[Entry]:
    """A tensor table with one or two entries changed."""
    table = list(table)
    for _ in range(random.randrange(1, 3)):
        at = random.randrange(len(table))
        name, shape, kind, offset = (getattr(table[at], field) for field in ("name", "shape", "type", "offset"))
        fault = random.randrange(5)
        if fault == 0:
            name = random.choice((*NAMES, random.choice(table).name, "rope_freqs.weight"))
        elif fault == 1:
            shape = tuple(random.choice((*SIZES, *shape)) for _ in range(random.randrange(6)))
        elif fault == 2:
            kind = random.choice((*range(40), 1 << 31))
        elif fault == 3:
            offset = random.choice(SIZES)
        else:
            name, shape = "rope_freqs.weight", (random.choice((0, 1, 32, 1 << 40)),)
        table[at] = Entry(name, shape, kind, offset)
    return table


def gguf_bytes(metadata: dict[str, Any], table: list[Entry], data: bytes) -> bytes:
    """A file of these parts."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(table), len(metadata))
    for key, value in metadata.items():
        head += _string(key) + struct.pack("<I", _type(value)) + _payload(value)
    for entry in table:
        head += _string(entry.name) + struct.pack("<I", len(entry.shape))
        head += b"".join(_u64(size) for size in entry.shape) + struct.pack("<I", entry.type) + _u64(entry.offset)
    return head.ljust(-(-len(head) // _ALIGNMENT) * _ALIGNMENT, b"\0") + data


def nested_arrays(depth: int) -> bytes:
    """A file whose one value is an array in an array in an array …"""
    array = struct.pack("<IQ", _ARRAY, 1) * depth + struct.pack("<IQ", _UINT8, 0)
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _string("key") + struct.pack("<I", _ARRAY) + array


def random_header(random: Random) -> bytes:
    """What begins like a GGUF file and goes on at random, counts included."""
    counts = struct.pack("<IQQ", random.choice((1, 2, 3, 3 << 24)), random.choice(SIZES), random.choice(SIZES))
    return b"GGUF" + counts + random_bytes(random, random.randrange(200))


def _type(value: Any) -> int:
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, int):
        return _INT32 if abs(value) < 1 << 31 else _INT64
    return _FLOAT64 if isinstance(value, float) else _STRING if isinstance(value, str) else _ARRAY


def _payload(value: Any) -> bytes:
    if isinstance(value, list):
        kind = max(map(_type, value)) if value else _INT32
        return struct.pack("<IQ", kind, len(value)) + b"".join(_item(item, kind) for item in value)
    return _item(value, _type(value))


def _item(value: Any, kind: int) -> bytes:
    if kind == _STRING:
        return _string(str(value))
    if kind == _ARRAY:
        return _payload(value)
    code = {_BOOL: "<?", _INT32: "<i", _INT64: "<q", _FLOAT64: "<d"}[kind]
    return struct.pack(code, value)


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return _u64(len(data)) + data


def _u64(value: int) -> bytes:
    return struct.pack("<Q", value % (1 << 64))
