"""Reading JSON that someone else wrote: whatever is wrong with it becomes an ArtifactError that names the file."""

from __future__ import annotations

import json
from typing import Any

from fut_runtime.errors import ArtifactError


def parse_object(text: str | bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        text: the document, UTF-8 when given as bytes.
        where: file name for messages.

    Raises:
        ArtifactError: not an object, or what `strict_json` refuses, NaN and infinities among it.
    """
    try:
        data = strict_json(text, constants=False)
    except ValueError as error:
        raise ArtifactError(f"{where}: not valid JSON ({error}); the file is damaged") from error
    if not isinstance(data, dict):
        raise ArtifactError(f"{where}: holds a JSON {type(data).__name__}, expected an object")
    return data


def strict_json(text: str | bytes, *, constants: bool) -> Any:
    """Parse a JSON document that a stranger may have written.

    Args:
        text: the document, UTF-8 when given as bytes.
        constants: whether NaN and infinities are taken, which Python writes and other readers refuse.

    Raises:
        ValueError: not UTF-8, not JSON, nested too deeply, a key given twice, or halves of surrogate pairs, which
            Python would accept but can neither print nor write again.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in result if keys.count(key) > 1)
            raise ValueError(f"the key {excerpt(twice)} stands twice in one object")
        return result

    def no_constant(name: str) -> Any:
        raise ValueError(f"it holds {name}, which is not JSON")

    try:
        if isinstance(text, bytes):
            text = text.decode()
        data = json.loads(text, object_pairs_hook=unique, parse_constant=None if constants else no_constant)
        if "\\ud" in text.lower():
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return data


def excerpt(value: object) -> str:
    """A value from a file as it may stand in a message: what Python calls it, cut where that is long."""
    try:
        text = repr(value)
    except ValueError:  # Python spells no integer of more than some thousand digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}…"


def shown(name: str) -> str:
    """A name from a file as it may stand in a message: quoted and escaped where it would disturb a terminal."""
    return name if name.isprintable() else repr(name)


def canonical(data: Any) -> str:
    """The one text an object has in an artifact: keys sorted, two-space indent, UTF-8, newline at the end."""
    return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
