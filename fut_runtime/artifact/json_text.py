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
        ArtifactError: not UTF-8, not JSON, nested too deeply, not an object, a key given twice, or NaN, infinities and
            halves of surrogate pairs, which Python would accept but other readers do not.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ArtifactError(f"{where}: the key {twice!r} stands twice in one object; the file is damaged")
        return result

    def no_constant(name: str) -> Any:
        raise ArtifactError(f"{where}: holds {name}, which is not JSON; the file is damaged")

    try:
        if isinstance(text, bytes):
            text = text.decode()
        data = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
        if "\\ud" in text.lower():
            # Half a surrogate pair parses, but no text that holds it can be printed or written again.
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{where}: not valid JSON ({error}); the file is damaged") from error
    if not isinstance(data, dict):
        raise ArtifactError(f"{where}: holds a JSON {type(data).__name__}, expected an object")
    return data


def shown(name: str) -> str:
    """A name from a file as it may stand in a message: quoted and escaped where it would disturb a terminal."""
    return name if name.isprintable() else repr(name)


def canonical(data: Any) -> str:
    """The one text an object has in an artifact: keys sorted, two-space indent, UTF-8, newline at the end."""
    return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
