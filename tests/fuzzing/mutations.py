"""Damage for small valid files: to their bytes, and to the tree of a JSON document.

Everything is drawn from a `random.Random`, which hypothesis can play (`st.randoms()`) and a seed can repeat.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

#: Lengths, counts and offsets that readers have taken at their word elsewhere.
SIZES: tuple[int, ...] = (
    *(0, 1, 7, 8, 255, 4096, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 48, 1 << 62),
    *((1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)

#: File names that lead out of a directory, or that systems and terminals trip over.
NAMES: tuple[str, ...] = (
    *("../../etc/passwd", "/etc/passwd", "..", ".", "", "a/../../b", "..\\x", "C:x", "~", "con", "config.json"),
    *("a\0b", "\ud800", "\x1b[2J", "\u202ex", "é" * 700, "x" * 5000, "sub/" * 300 + "x"),
)

#: JSON texts that stand where another value is expected.
FRAGMENTS: tuple[str, ...] = (
    *("null", "true", "false", "0", "-0", "-1", "1", "2", "0.5", "-1.5", "1e-320", "1e999", "-1e999", "1e308"),
    *("NaN", "Infinity", "-Infinity", "1e400", str(10**400), "-" + "9" * 30, "1" * 4299, "1" * 5000),
    *(str(size) for size in SIZES),
    *('""', '"x"', '"1"', '"NaN"', '"none"', '"\\ud800"', '"\\u0000"', "[]", "{}", "[[]]", "[{}]", '[""]', "[null]"),
    *("[0]", "[-1]", "[1e999]", "[1,2]", '["a","a"]', '{"a":1,"a":2}', '{"":0}', "[" * 60 + "]" * 60),
    *('{"a":' * 60 + "1" + "}" * 60, "[" * 50_000, '{"a":' * 50_000, "[1,", '"' + "y" * 10_000 + '"'),
    *(json.dumps(name) for name in NAMES),
)


class Raw(str):
    """A piece of JSON that is written as it stands."""


def random_bytes(random: Random, count: int) -> bytes:
    """Bytes one by one: what hypothesis can make smaller."""
    return bytes(random.randrange(256) for _ in range(count))


def damage_bytes(random: Random, data: bytes, *, header: int | None = None) -> bytes:
    """Bytes with one to four faults, most of them in the first `header`, where readers look; or wholly random ones."""
    if random.random() < 0.05:
        return random_bytes(random, random.randrange(64))
    for _ in range(random.randrange(1, 5)):
        data = _one_fault(random, data, header)
    return data


def _one_fault(random: Random, data: bytes, header: int | None) -> bytes:
    reach = len(data) if header is None or random.random() < 0.1 else min(header, len(data))
    at = random.randrange(reach + 1)
    kind = random.randrange(8)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + random_bytes(random, random.randrange(1, 16)) + data[at:]
    if kind == 2:
        return data[:at] + data[at + random.randrange(1, 32) :]
    if kind == 3:
        width = random.choice((1, 2, 4, 8))
        size = random.choice(SIZES) & ((1 << 8 * width) - 1)
        return data[:at] + size.to_bytes(width, "little") + data[at + width :]
    if kind == 4:
        end = at + random.randrange(1, 64)
        return data[:at] + data[at:end] * random.randrange(2, 5) + data[end:]
    if kind == 5:
        return data[:at] + random.choice(FRAGMENTS[:60]).encode(errors="replace") + data[at:]
    if kind == 6:
        return data[:at] + b"\0" * random.randrange(1, 32) + data[at:]
    return data[:at] + bytes(b ^ (1 << random.randrange(8)) for b in data[at : at + 1]) + data[at + 1 :]


def damage_json(random: Random, document: Any) -> str:
    """The text of a JSON document with one to three values or keys changed, left out, doubled or moved."""
    tree = _Tree(document)
    for _ in range(random.randrange(1, 4)):
        tree.damage(random)
    text = tree.text()
    if random.random() < 0.1:
        at = random.randrange(len(text) + 1)
        text = text[:at] + random.choice(("", ",", "}", "\x00", "\ufeff", "//")) + text[at + random.randrange(3) :]
    return text


class _Tree:
    """A document whose objects are lists of pairs, so that a key may stand twice."""

    def __init__(self, document: Any) -> None:
        self._root = [_pairs(document)]

    def damage(self, random: Random) -> None:
        holder = self._root
        # Down a random path, so that what lies high, and names everything below it, is met often.
        while holder:
            index = random.randrange(len(holder))
            value = holder[index][1] if isinstance(holder[index], tuple) else holder[index]
            inner = value[1] if isinstance(value, list) and value[:1] == ["{"] else value
            if not isinstance(inner, list) or not inner or random.random() < 0.25:
                return self._change(random, holder, index)
            holder = inner
        return None

    def text(self) -> str:
        return _text(self._root[0])

    @staticmethod
    def _change(random: Random, holder: list[Any], index: int) -> None:
        entry = holder[index]
        new = Raw(random.choice(FRAGMENTS))
        kind = random.randrange(8)
        if kind == 0 and len(holder) > 1:
            del holder[index]
        elif kind == 1:
            holder.insert(random.randrange(len(holder) + 1), entry)
        elif kind == 2 and len(holder) > 1:
            other = random.randrange(len(holder))
            holder[index], holder[other] = holder[other], holder[index]
        elif kind == 3 and isinstance(entry, tuple):
            holder[index] = (random.choice((*NAMES, "format", "weight_map")), entry[1])
        elif isinstance(entry, tuple):
            holder[index] = (entry[0], new)
        else:
            holder[index] = new


def _pairs(value: Any) -> Any:
    """Objects as ["{", [(key, value), …]]."""
    if isinstance(value, dict):
        return ["{", [(key, _pairs(item)) for key, item in value.items()]]
    return [_pairs(item) for item in value] if isinstance(value, list) else value


def _text(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, list) and value[:1] == ["{"]:
        return "{" + ",".join(f"{json.dumps(key)}:{_text(item)}" for key, item in value[1]) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_text, value)) + "]"
    return json.dumps(value)
