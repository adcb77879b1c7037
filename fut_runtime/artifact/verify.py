"""Checks every byte of an artifact and says which file, chunk and tensors are damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fut_runtime.artifact.hashing import CHUNK_BYTES, FileHash, hash_file
from fut_runtime.artifact.json_text import parse_object
from fut_runtime.artifact.layout import TensorSpec, all_tensors
from fut_runtime.artifact.manifest import Manifest
from fut_runtime.artifact.paths import (
    FILES_FILE,
    INDEX_FILE,
    LOCK_FILE,
    MANIFEST_FILE,
    MARKER_FILE,
    inside,
    is_shard_name,
)
from fut_runtime.artifact.reader import check_index, read_manifest
from fut_runtime.artifact.seal import read_files, read_marker, read_small
from fut_runtime.artifact.shards import TensorPlace, read_header
from fut_runtime.errors import ArtifactError

#: Files hashed at once: enough to keep a fast disk busy, few enough not to take a whole machine.
_THREADS = 4
#: Shard file -> tensors that the index says are in it.
Members = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: `not_sealed`, `file_list`, `manifest`, `missing_file`, `size`, `hash`, `header`, `missing_tensor`,
            `extra_tensor`, `wrong_tensor`, `index` or `extra_file`.
        file: name inside the artifact.
        message: what was found, what was expected and what to do.
        chunk: number of the damaged 64 MiB chunk, from 0.
        tensors: tensors that the damage touches.
    """

    kind: str
    file: str
    message: str
    chunk: int | None = None
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class VerifyReport:
    """What a verification found.

    Attributes:
        path: the artifact.
        findings: everything that is wrong; empty for a whole artifact.
        files: sealed files that were read.
        nbytes: their bytes.
        unsealed: files that are there without belonging to the sealed set, such as logs; not an error.
    """

    path: Path
    findings: tuple[Finding, ...]
    files: int
    nbytes: int
    unsealed: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings


def sealed_bytes(path: Path) -> int:
    """Bytes a verification will read, for a progress bar; 0 when the list of files cannot be read."""
    try:
        return sum(entry.size for entry in read_files(path, None).values())
    except ArtifactError:
        return 0


def verify_artifact(path: Path, progress: Callable[[int], None] | None = None) -> VerifyReport:
    """Read and check a whole artifact, collecting findings instead of stopping at the first.

    Args:
        path: the artifact's directory.
        progress: told the bytes read by each step, from several threads.

    Raises:
        ArtifactError: `path` is no artifact at all.
    """
    findings: list[Finding] = []
    digest = None
    try:
        digest = read_marker(path)
    except ArtifactError as error:
        if not (path / MANIFEST_FILE).exists() and not (path / MARKER_FILE).exists():
            raise
        findings.append(Finding("not_sealed", MARKER_FILE, str(error)))
    files: dict[str, FileHash] = {}
    try:
        files = read_files(path, digest)
    except ArtifactError as error:
        findings.append(Finding("file_list", FILES_FILE, str(error)))
        try:
            files = read_files(path, None)  # its own hash is wrong, but it may still tell what else is
        except ArtifactError:
            return VerifyReport(path, tuple(findings), 0, 0, ())
    manifest, manifest_findings = _manifest(path, files)
    members = _members(path)
    with ThreadPoolExecutor(_THREADS) as pool:
        checks = pool.map(lambda item: _check_file(path, item[0], item[1], members, progress), files.items())
        findings += [finding for result in checks for finding in result]
    findings += manifest_findings
    findings += _check_structure(path, files, manifest, members)
    present = {p.relative_to(path).as_posix() for p in path.rglob("*") if not p.is_dir()}
    unsealed = sorted(present - set(files) - {FILES_FILE, MARKER_FILE, LOCK_FILE})
    for name in unsealed:
        if name.endswith(".safetensors"):
            message = f"{path / name}: is not among the sealed files; remove it, or fetch the artifact again"
            findings.append(Finding("extra_file", name, message, tensors=_names(path / name)))
    return VerifyReport(path, tuple(findings), len(files), sum(f.size for f in files.values()), tuple(unsealed))


def _manifest(path: Path, files: dict[str, FileHash]) -> tuple[Manifest | None, list[Finding]]:
    try:
        return read_manifest(path, files), []
    except ArtifactError as error:
        # A changed or missing manifest is reported with the other files; only a sealed but invalid one is news.
        try:
            intact = hash_file(path / MANIFEST_FILE).sha256 == files[MANIFEST_FILE].sha256
        except OSError:
            intact = False
        return None, [Finding("manifest", MANIFEST_FILE, str(error))] if intact else []


def _check_file(
    path: Path, name: str, expected: FileHash, members: Members, progress: Callable[[int], None] | None
) -> list[Finding]:
    try:
        place = inside(path, name)
        if not place.is_file():
            message = f"{place}: is missing; fetch the artifact again, or convert the model again"
            return [Finding("missing_file", name, message, tensors=members.get(name, ()))]
        found = hash_file(place, progress)
    except ArtifactError as error:
        return [Finding("missing_file", name, str(error))]
    except OSError as error:
        return [Finding("missing_file", name, f"{path / name}: cannot be read ({error.strerror}); check the disk")]
    findings = []
    if found.size != expected.size:
        cause = "truncated" if found.size < expected.size else "longer than sealed"
        lost = _touched(path, name, members, min(found.size, expected.size), max(found.size, expected.size))
        findings.append(
            Finding(
                "size",
                name,
                f"{place}: {found.size} bytes, expected {expected.size}; the file is {cause}{_listed(lost)}; "
                "fetch it again",
                tensors=lost,
            )
        )
    whole_chunks = min(found.size, expected.size) // CHUNK_BYTES
    comparable = len(expected.chunks) if found.size == expected.size else whole_chunks
    damaged = [i for i in range(comparable) if found.chunks[i] != expected.chunks[i]]
    for chunk in damaged:
        begin, end = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, expected.size)
        touched = _touched(path, name, members, begin, end)
        message = (
            f"{place}: chunk {chunk} (bytes {begin} to {end}) has SHA-256 {found.chunks[chunk]}, "
            f"expected {expected.chunks[chunk]}{_listed(touched)}; fetch the file again"
        )
        findings.append(Finding("hash", name, message, chunk, touched))
    if not findings and found.sha256 != expected.sha256:
        message = f"{place}: SHA-256 is {found.sha256}, expected {expected.sha256}; the list of files is inconsistent"
        findings.append(Finding("hash", name, message))
    return findings


def _check_structure(
    path: Path, files: dict[str, FileHash], manifest: Manifest | None, members: Members
) -> Iterator[Finding]:
    """Headers of the shards against the manifest, and the index against the headers."""
    shards: dict[str, list[TensorPlace]] = {}
    for name in filter(is_shard_name, files):
        try:
            shards[name] = read_header(inside(path, name), allow_truncated=True)  # sizes are compared above
        except ArtifactError as error:
            if (path / name).is_file():
                yield Finding("header", name, str(error), tensors=members.get(name, ()))
    if manifest is None:
        return
    expected = {spec.name: spec for spec in all_tensors(manifest)}
    seen: dict[str, TensorSpec] = {}
    for name, places in shards.items():
        for found in (place.spec for place in places):
            wanted = expected.get(found.name)
            where = f"{path / name}: tensor {found.name!r}"
            if wanted is None or found.name in seen:
                reason = "is not in the manifest" if wanted is None else "is also in another shard"
                yield Finding("extra_tensor", name, f"{where} {reason}; fetch the artifact again", None, (found.name,))
            elif found != wanted:
                message = f"{where} is {found.dtype} {list(found.shape)}, expected {wanted.dtype} {list(wanted.shape)}"
                yield Finding("wrong_tensor", name, message, None, (found.name,))
            seen[found.name] = found
    if len(shards) < sum(map(is_shard_name, files)):
        return  # the tensors of a missing or unreadable shard are named with it
    missing = tuple(name for name in expected if name not in seen)
    if missing:
        yield Finding("missing_tensor", MANIFEST_FILE, f"{path}: no shard holds{_listed(missing)[1:]}", None, missing)
    try:
        check_index(path, shards)
    except ArtifactError as error:
        yield Finding("index", INDEX_FILE, str(error))


def _touched(path: Path, name: str, members: Members, begin: int, end: int) -> tuple[str, ...]:
    """Tensors in a byte range of a shard by its header; where that is damaged, all that the index has there."""
    if not is_shard_name(name):
        return ()
    try:
        places = read_header(path / name, allow_truncated=True)
    except ArtifactError:
        return members.get(name, ())
    return tuple(p.spec.name for p in places if p.offset < end and p.offset + p.spec.nbytes > begin)


def _members(path: Path) -> Members:
    try:
        weight_map = parse_object(read_small(path, INDEX_FILE), INDEX_FILE).get("weight_map")
    except ArtifactError:
        return {}
    members: dict[str, list[str]] = {}
    for tensor, shard in weight_map.items() if isinstance(weight_map, dict) else ():
        members.setdefault(str(shard), []).append(tensor)
    return {shard: tuple(tensors) for shard, tensors in members.items()}


def _names(path: Path) -> tuple[str, ...]:
    try:
        return tuple(place.spec.name for place in read_header(path))
    except ArtifactError:
        return ()


def _listed(tensors: tuple[str, ...]) -> str:
    if not tensors:
        return ""
    more = f" and {len(tensors) - 8} more" if len(tensors) > 8 else ""
    return f" (tensors {', '.join(tensors[:8])}{more})"
