"""Reads dataclasses from JSON objects of any origin: every key known, every value of the declared type."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, get_args, get_origin, get_type_hints

from fut_runtime.artifact.json_text import excerpt, shown
from fut_runtime.errors import ArtifactError

#: JSON has no integer limit; nothing in an artifact is larger.
_MAX_INT = 1 << 48


def read_fields(cls: type, data: Any, where: str) -> dict[str, Any]:
    """Constructor arguments of a dataclass from a JSON object.

    Fields whose type is a dataclass, or holds one, come back as they are: the caller reads them in turn.

    Args:
        cls: a dataclass with fields of bool, int, float, str, tuples and dicts of those, or None.
        data: the parsed object.
        where: file and key, for messages.

    Raises:
        ArtifactError: not an object, a key unknown or missing, or a value of another type.
    """
    if not isinstance(data, Mapping):
        raise ArtifactError(f"{where}: found {excerpt(data)}, expected an object")
    declared = {f.name: f for f in fields(cls)}
    unknown = sorted(set(data) - set(declared))
    if unknown:
        raise ArtifactError(f"{where}: unknown keys {excerpt(unknown)}; expected among {sorted(declared)}")
    missing = [
        n for n, f in declared.items() if n not in data and f.default is MISSING and f.default_factory is MISSING
    ]
    if missing:
        raise ArtifactError(f"{where}: missing keys {missing}")
    hints = get_type_hints(cls)
    return {key: _read(value, hints[key], f"{where}.{key}") for key, value in data.items()}


def _read(value: Any, hint: Any, where: str) -> Any:
    if isinstance(hint, types.UnionType):
        return None if value is None else _read(value, next(a for a in get_args(hint) if a is not type(None)), where)
    if get_origin(hint) is tuple:
        items = get_args(hint)
        if not isinstance(value, list) or (items[-1] is not Ellipsis and len(value) != len(items)):
            count = "a list" if items[-1] is Ellipsis else f"a list of {len(items)}"
            raise ArtifactError(f"{where}: found {excerpt(value)}, expected {count}")
        return tuple(_read(item, items[0], where) for item in value)
    if get_origin(hint) is dict:
        if not isinstance(value, dict):
            raise ArtifactError(f"{where}: found {excerpt(value)}, expected an object")
        item_hint = get_args(hint)[1]
        return value if item_hint is Any else {k: _read(v, item_hint, f"{where}.{shown(k)}") for k, v in value.items()}
    if hint is float and type(value) in (int, float) and abs(value) < 1e300:
        return float(value)
    if hint is int and type(value) is int and abs(value) < _MAX_INT:
        return value
    if hint in (bool, str) and type(value) is hint:
        return value
    if hint in (bool, int, float, str):
        raise ArtifactError(f"{where}: found {excerpt(value)}, expected {_TYPE_NAMES[hint]}")
    return value


_TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a finite number", str: "a string"}


def check_positive(values: Mapping[str, float | int | None], where: str, maximum: float = math.inf) -> None:
    """Every value that is not None is above 0 and at most `maximum`; ArtifactError names the first that is not."""
    for key, value in values.items():
        if value is not None and not 0 < value <= maximum:
            limit = "" if maximum == math.inf else f", at most {maximum}"
            raise ArtifactError(f"{where}.{key}: found {value}, expected a positive number{limit}")
