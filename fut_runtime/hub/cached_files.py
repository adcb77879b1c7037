"""Files in the Hub's cache, which are named after the hash of what they hold."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

_BLOCK_BYTES = 1 << 20


def damaged_files(paths: Iterable[Path]) -> list[Path]:
    """Those whose content does not have the hash that the Hub gave for it.

    Snapshots link to files that are named after it: SHA-256 of large files, git's SHA-1 of others. Where the file
    system has no links nothing is known, and nothing is damaged.
    """
    return [path for path in paths if not matches(path.resolve(), path.resolve().name)]


def remove_files(paths: Iterable[Path]) -> None:
    """Take files out of the cache: the links, and what they lead to."""
    for path in paths:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def matches(path: Path, oid: str) -> bool:
    """Whether a file has a content of this name: SHA-256 of large files, git's SHA-1 of others; true for any other."""
    if re.fullmatch(r"[0-9a-f]{64}", oid):
        digest = hashlib.sha256()
    elif re.fullmatch(r"[0-9a-f]{40}", oid):
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    else:
        return True
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest() == oid
