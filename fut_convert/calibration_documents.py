"""Where a calibration text comes from: the one that ships, a text file, a JSONL file, or a data set on the Hub.

Documents of a JSONL file or a data set are joined by a blank line into one text, and no more of them is read than asked
for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fut_convert.errors import ConvertError
from fut_convert.hub_dataset import open_hub_dataset
from fut_convert.recipe import BUILTIN_TEXT, HUB_PREFIX, CalibrationRecipe
from fut_runtime.artifact.paths import plain_name

JSONL_SUFFIXES = (".jsonl", ".ndjson")
_HASH_BYTES = 1 << 20
#: Between two documents.
_SEPARATOR = "\n\n"
_SHIPPED = Path(__file__).with_name("data") / "calibration.txt"


@dataclass(frozen=True)
class CalibrationText:
    """A text that is read from its beginning as far as it is needed.

    Attributes:
        name: for messages.
        read: read(n) -> the first n characters at least, or the whole text where that is shorter.
        record: called when nothing more will be read: what identifies the text in the manifest, without any path.
    """

    name: str
    read: Callable[[int], str]
    record: Callable[[], dict[str, Any]]


def open_calibration_text(recipe: CalibrationRecipe) -> CalibrationText:
    """The text that a recipe names.

    Raises:
        ConvertError: it cannot be read, is not UTF-8, or a document is not what it should be; HubError: the data set
            cannot be fetched.
    """
    if recipe.text == BUILTIN_TEXT:
        return _plain_text(_SHIPPED, BUILTIN_TEXT)
    if recipe.text.startswith(HUB_PREFIX):
        documents, identity = open_hub_dataset(recipe.text, recipe.field)
        return _hub_text(recipe.text, documents, identity)
    path = Path(recipe.text).expanduser()
    if path.suffix.lower() in JSONL_SUFFIXES:
        return _jsonl_text(path, recipe.field)
    return _plain_text(path, plain_name(path.name))


class _Joined:
    """Documents joined into a text, as many as are needed; those of white space alone are left out."""

    def __init__(self, documents: Iterator[str]) -> None:
        self._documents = documents
        self._parts: list[str] = []
        self._characters = 0

    @property
    def count(self) -> int:
        """Documents read so far."""
        return len(self._parts)

    @property
    def text(self) -> str:
        """What was read so far."""
        return _SEPARATOR.join(self._parts)

    def read(self, characters: int) -> str:
        """See `CalibrationText.read`."""
        while self._characters < characters:
            document = next(self._documents, None)
            if document is None:
                break
            if document.strip():
                self._parts.append(document)
                self._characters += len(document) + (len(_SEPARATOR) if self.count > 1 else 0)
        return self.text


def _plain_text(path: Path, name: str) -> CalibrationText:
    try:
        data = path.read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise ConvertError(f"calibration text {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConvertError(f"calibration text {path.name}: not UTF-8 ({error}); convert it first") from error
    digest = hashlib.sha256(data).hexdigest()
    return CalibrationText(name, lambda _: text, lambda: {"text": name, "sha256": digest})


def _jsonl_text(path: Path, field: str) -> CalibrationText:
    try:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while block := file.read(_HASH_BYTES):
                digest.update(block)
    except OSError as error:
        raise ConvertError(f"calibration text {path}: {error.strerror}") from error
    joined = _Joined(_json_lines(path, field))
    return CalibrationText(
        plain_name(path.name),
        joined.read,
        lambda: {
            "text": plain_name(path.name),
            "field": field,
            "sha256": digest.hexdigest(),
            "documents": joined.count,
        },
    )


def _json_lines(path: Path, field: str) -> Iterator[str]:
    """The field of each line's object; blank lines are skipped."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _document(line, field, f"calibration text {path.name}, line {number}")
    except OSError as error:
        raise ConvertError(f"calibration text {path}: {error.strerror}") from error


def _document(line: bytes, field: str, where: str) -> str:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConvertError(f"{where}: not UTF-8 ({error}); convert it first") from error
    except (ValueError, RecursionError) as error:
        raise ConvertError(f"{where}: not JSON ({error}); expected one object a line") from error
    if not isinstance(value, dict):
        raise ConvertError(f"{where}: is {type(value).__name__}, expected an object with a text in {field!r}")
    if field not in value:
        found = ", ".join(map(repr, list(value)[:8])) or "nothing"
        raise ConvertError(f"{where}: has no {field!r}, but {found}; name the field with --calibration-field")
    text = value[field]
    if not isinstance(text, str):
        raise ConvertError(
            f"{where}: {field!r} is {type(text).__name__}, expected a text; name its field with --calibration-field"
        )
    return text


def _hub_text(name: str, documents: Iterator[str], identity: dict[str, Any]) -> CalibrationText:
    joined = _Joined(documents)
    return CalibrationText(
        name,
        joined.read,
        lambda: {
            "text": name,
            **identity,
            # Of a data set nothing is fetched but what is read, so the hash is that of the documents read.
            "sha256": hashlib.sha256(joined.text.encode("utf-8", "surrogatepass")).hexdigest(),
            "documents": joined.count,
        },
    )
