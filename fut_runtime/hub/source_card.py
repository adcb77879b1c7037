"""What the card of the source says for programs to read: the YAML between its first two lines of dashes.

A stranger wrote it, so nothing but a few short plain values is taken from it.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from fut_runtime.artifact.paths import CARD_FILE, SOURCE_CARD_FILE
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.seal import read_small

_FRONT_MATTER = re.compile(r"---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|\Z)", re.DOTALL)
#: Cards have some hundred bytes of it.
_MAX_BYTES = 64 << 10
_MAX_LENGTH = 300
_MAX_ITEMS = 200
_LICENSE = re.compile(r"[A-Za-z0-9][\w.+-]{0,63}")


def carried_metadata(artifact: Artifact) -> dict[str, Any]:
    """Licence and languages of the source, as its card or its GGUF file has them.

    `license`, with `license_name` and `license_link` for those that have no identifier, and `language`: text, or lists
    of text. What is missing, too long, or of another type is left out.
    """
    data = _front_matter(_source_card(artifact))
    found: dict[str, Any] = {}
    for key in ("license", "license_name", "license_link", "language"):
        value = _plain(data.get(key))
        if value is not None:
            found[key] = value
    stated = artifact.manifest.source.get("license")
    if "license" not in found and isinstance(stated, str):
        found["license"] = stated
    if not is_license(found.get("license")):
        found.pop("license", None)
    return found


def is_license(value: object) -> bool:
    """Whether a value has the form of the Hub's licence identifiers, as `apache-2.0`, or is a list of such."""
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and _LICENSE.fullmatch(name) for name in names)


def _source_card(artifact: Artifact) -> str:
    for name in (SOURCE_CARD_FILE, CARD_FILE):
        if name in artifact.files:
            return read_small(artifact.path, name)[: 2 * _MAX_BYTES].decode(errors="replace")
    return ""


def _front_matter(card: str) -> dict[Any, Any]:
    match = _FRONT_MATTER.match(card.removeprefix("\ufeff"))
    if match is None or len(match[1]) > _MAX_BYTES:
        return {}
    try:
        data = yaml.safe_load(match[1])
    except (yaml.YAMLError, RecursionError, ValueError):  # ValueError: dates that are none
        return {}
    return data if isinstance(data, dict) else {}


def _plain(value: object) -> str | list[str] | None:
    if isinstance(value, list):
        items = [item for item in value[:_MAX_ITEMS] if _short(item)]
        return items or None
    return value if isinstance(value, str) and _short(value) else None


def _short(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_LENGTH and value.isprintable()
