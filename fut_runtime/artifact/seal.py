"""`fut_files.json`, an artifact's files with their hashes, and `fut_sealed.json`, the marker of a whole one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fut_runtime.artifact.hashing import CHUNK_BYTES, FileHash, hash_bytes
from fut_runtime.artifact.json_text import canonical, parse_object
from fut_runtime.artifact.manifest import FORMAT_NAME, FORMAT_VERSION, check_version
from fut_runtime.artifact.paths import FILES_FILE, INDEX_FILE, MANIFEST_FILE, MARKER_FILE, check_relative_name, inside
from fut_runtime.errors import ArtifactError

_DIGEST = re.compile(r"[0-9a-f]{64}")
#: Nothing but a damaged or hostile file is larger.
_MAX_LIST_BYTES = 256 << 20


def files_text(hashes: Mapping[str, FileHash]) -> str:
    """`fut_files.json`."""
    return canonical(
        {
            "format": FORMAT_NAME,
            "format_version": FORMAT_VERSION,
            "chunk_bytes": CHUNK_BYTES,
            "files": {n: {"size": h.size, "sha256": h.sha256, "chunks": list(h.chunks)} for n, h in hashes.items()},
        }
    )


def marker_text(files: str) -> str:
    """`fut_sealed.json` for this text of `fut_files.json`."""
    return canonical(
        {
            "format": FORMAT_NAME,
            "format_version": FORMAT_VERSION,
            "files": FILES_FILE,
            "sha256": hash_bytes(files.encode()).sha256,
        }
    )


def read_small(root: Path, name: str) -> bytes:
    """Content of one of the artifact's JSON files.

    Raises:
        ArtifactError: missing, unreadable, or absurdly large.
    """
    path = inside(root, name)
    try:
        size = path.stat().st_size
        if size > _MAX_LIST_BYTES:
            raise ArtifactError(f"{path}: {size} bytes, expected less than {_MAX_LIST_BYTES}; the file is damaged")
        return path.read_bytes()
    except FileNotFoundError:
        raise ArtifactError(f"{path}: is missing; fetch the artifact again, or convert the model again") from None
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from error


def read_marker(root: Path) -> str:
    """SHA-256 that `fut_files.json` must have.

    Raises:
        ArtifactError: no directory, not an artifact, not sealed, or of a newer format.
    """
    if not root.is_dir():
        raise ArtifactError(f"{root}: is no directory; give the directory that fut-convert wrote")
    if not (root / MARKER_FILE).exists():
        if not (root / MANIFEST_FILE).exists():
            raise ArtifactError(
                f"{root}: is not a FuTransformer artifact (no {MANIFEST_FILE}); convert the model with fut-convert"
            )
        raise ArtifactError(
            f"{root}: is not sealed (no {MARKER_FILE}): its conversion or its download did not finish; "
            "convert or fetch it again"
        )
    where = str(root / MARKER_FILE)
    marker = parse_object(read_small(root, MARKER_FILE), where)
    check_version(marker, where)
    digest = marker.get("sha256")
    if set(marker) != {"format", "format_version", "files", "sha256"} or marker["files"] != FILES_FILE:
        raise ArtifactError(f"{where}: unexpected content; the marker is damaged")
    return _digest(digest, where)


def read_files(root: Path, expected_sha256: str | None) -> dict[str, FileHash]:
    """The list of sealed files.

    Args:
        root: the artifact's directory.
        expected_sha256: digest from the marker; None skips the comparison.

    Raises:
        ArtifactError: the list does not match the marker, or is not well formed.
    """
    where = str(root / FILES_FILE)
    text = read_small(root, FILES_FILE)
    found = hash_bytes(text).sha256
    if expected_sha256 is not None and found != expected_sha256:
        raise ArtifactError(
            f"{where}: SHA-256 is {found}, expected {expected_sha256} from {MARKER_FILE}; the file was changed: "
            "fetch the artifact again"
        )
    data = parse_object(text, where)
    check_version(data, where)
    files = data.get("files")
    if data.get("chunk_bytes") != CHUNK_BYTES or not isinstance(files, dict):
        raise ArtifactError(f"{where}: chunk_bytes is {data.get('chunk_bytes')!r}, expected {CHUNK_BYTES}, and files")
    hashes = {
        check_relative_name(name, where): _file_hash(entry, f"{where}: {name!r}") for name, entry in files.items()
    }
    for name in (MANIFEST_FILE, INDEX_FILE):
        if name not in hashes:
            raise ArtifactError(f"{where}: does not list {name}; the file is damaged")
    return hashes


def _file_hash(entry: Any, where: str) -> FileHash:
    if not isinstance(entry, dict) or set(entry) != {"size", "sha256", "chunks"}:
        raise ArtifactError(f"{where}: entry is not an object of size, sha256 and chunks")
    size, chunks = entry["size"], entry["chunks"]
    if type(size) is not int or not 0 <= size < 1 << 50:
        raise ArtifactError(f"{where}: size is {size!r}, expected a number of bytes")
    count = -(-size // CHUNK_BYTES)
    if not isinstance(chunks, list) or len(chunks) != count:
        raise ArtifactError(f"{where}: expected the hashes of {count} chunks for {size} bytes")
    return FileHash(size, _digest(entry["sha256"], where), tuple(_digest(chunk, where) for chunk in chunks))


def _digest(value: Any, where: str) -> str:
    if not isinstance(value, str) or _DIGEST.fullmatch(value) is None:
        raise ArtifactError(f"{where}: {str(value)[:80]!r} is no SHA-256, expected 64 hex digits")
    return value
