"""Names of files inside an artifact, and the refusal of names and links that lead out of it."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from fut_runtime.errors import ArtifactError

MANIFEST_FILE = "fut_config.json"
FILES_FILE = "fut_files.json"
MARKER_FILE = "fut_sealed.json"
INDEX_FILE = "model.safetensors.index.json"
LOCK_FILE = ".fut_lock"
PROGRESS_DIRECTORY = ".fut_progress"
#: What the conversion reports about itself, outside the sealed set: a page, and its contents as data.
REPORT_FILE = "report.md"
REPORT_DATA_FILE = "report.json"
#: The Hub shows this file as a repository's page. It belongs to the artifact's own card, outside the sealed set, so the
#: source's card is sealed under another name.
CARD_FILE = "README.md"
SOURCE_CARD_FILE = "SOURCE_README.md"

_OWN_NAME = re.compile(r"fut_.*\.json|model.*\.safetensors(\.index\.json)?|\.fut_(lock|progress(/.*)?)", re.IGNORECASE)
_SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def shard_name(index: int, count: int) -> str:
    """File name of shard `index` (from 0) of `count`."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def is_shard_name(name: str) -> bool:
    """Whether a file name is that of a shard."""
    return _SHARD_NAME.fullmatch(name) is not None


def check_relative_name(name: object, where: str) -> str:
    """Check the name of a file inside an artifact: relative, `/` between its parts, no way out.

    Raises:
        ArtifactError: empty, absolute, with `..`, `.`, a backslash, a drive or a control character.
    """
    if not isinstance(name, str):
        raise ArtifactError(f"{where}: a file name is {name!r}, expected a string")
    parts = name.split("/")
    unsafe = any(part in ("", ".", "..") for part in parts) or any(c in "\\:" or not c.isprintable() for c in name)
    if unsafe or PurePosixPath(name).is_absolute() or len(name.encode(errors="replace")) > 1024:
        raise ArtifactError(
            f"{where}: unsafe file name {name!r}; expected a relative path without '..', backslashes or colons"
        )
    return name


def check_foreign_name(name: str, where: str) -> str:
    """Check the name of a side file or log: safe, and none of the artifact's own names.

    Raises:
        ArtifactError: see `check_relative_name`, or a name that an artifact uses itself.
    """
    check_relative_name(name, where)
    if _OWN_NAME.fullmatch(name):
        raise ArtifactError(
            f"{where}: {name!r} is a name that an artifact uses itself; leave the file out or rename it"
        )
    return name


def plain_name(name: str) -> str:
    """The name of a file as text that can be written: what is not UTF-8 in it becomes a replacement character."""
    return os.fsencode(name).decode(errors="replace")


def side_file_name(name: str) -> str:
    """Name in the artifact of a file of the source that is copied into it."""
    return SOURCE_CARD_FILE if name == CARD_FILE else name


def inside(root: Path, name: str) -> Path:
    """The regular file `name` under `root`, refusing links that lead out.

    A snapshot of the Hub's cache is a directory of links into the `blobs` directory beside it: those are followed.

    Raises:
        ArtifactError: unsafe name, or a link to a place outside. A missing file is not an error here.
    """
    path = root / check_relative_name(name, str(root))
    home = root.resolve()
    target = path.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(target.is_relative_to(place) for place in allowed):
        raise ArtifactError(
            f"{path}: is a link to {target}, outside {home}; links out are not followed: put a copy of the file there"
        )
    return path
