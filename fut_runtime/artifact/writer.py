"""Writes an artifact: tensors in any order straight to their place, then the hashes, the marker and the name."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from torch import Tensor

from fut_runtime.artifact.hashing import FileHash, FollowingHasher, hash_bytes
from fut_runtime.artifact.layout import all_tensors
from fut_runtime.artifact.manifest import Manifest
from fut_runtime.artifact.paths import (
    FILES_FILE,
    INDEX_FILE,
    MANIFEST_FILE,
    MARKER_FILE,
    PROGRESS_DIRECTORY,
    check_foreign_name,
    inside,
)
from fut_runtime.artifact.progress import INPUT_DIRECTORY, Progress, ProgressKeeper
from fut_runtime.artifact.seal import files_text, marker_text
from fut_runtime.artifact.shard_writer import OpenShard
from fut_runtime.artifact.shards import MAX_SHARD_BYTES, TORCH_DTYPES, TensorPlace, index_text, plan_shards
from fut_runtime.artifact.staging import StagingDirectory, os_errors, write_file
from fut_runtime.errors import ArtifactError


@dataclass
class _Parts:
    """How far one tensor is: rows that writers took on, where each part begins, and rows that are in the file."""

    claimed: int = 0
    written: int = 0
    starts: set[int] = field(default_factory=set)


class ArtifactWriter:
    """Writes the artifact `OUT`.

    Everything goes to `OUT.partial`, locked against a second writer. `seal` makes it an artifact: only then does `OUT`
    exist. As a context manager it removes `OUT.partial` when left without sealing, unless `save` has been called: then
    another writer with the same `inputs` goes on from there. At most the tensor that is being written is held in
    memory; the hashing follows in a background thread. `write` may be called from several threads.
    """

    def __init__(
        self,
        out: Path,
        manifest: Manifest,
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        overwrite: bool = False,
        inputs: Mapping[str, Any] | None = None,
        restart: bool = False,
    ) -> None:
        """Check the manifest, lock `OUT.partial` and create every shard with its header.

        Args:
            out: directory to create.
            manifest: what the artifact will hold.
            max_shard_bytes: size limit of a shard file; a single larger tensor has a shard of its own.
            overwrite: whether an existing artifact `out` is replaced, once the new one is whole.
            inputs: JSON-ready, whatever the tensors' bytes depend on; None where nothing is resumed or saved.
            restart: throw away what an interrupted writer saved.

        Raises:
            ArtifactError: the manifest contradicts itself, OUT exists or is being written, OUT.partial holds what was
                saved with other inputs, or the disk refuses.
        """
        text = manifest.to_json()
        Manifest.from_json(text, MANIFEST_FILE)
        self.manifest = manifest
        self._side_names = {check_foreign_name(name, f"{MANIFEST_FILE}: side_files") for name in manifest.side_files}
        self._hashes: dict[str, FileHash] = {}
        self._shards: list[OpenShard] = []
        self._places: dict[str, tuple[OpenShard, TensorPlace]] = {}
        self._progress = ProgressKeeper(inputs, restart=restart)
        self._hasher = FollowingHasher()
        self._parts: dict[str, _Parts] = {}
        self._lock = threading.Lock()
        self._finished = False
        try:
            self._staging = StagingDirectory(out, overwrite=overwrite, resumes=self._progress.continues)
        except BaseException:
            self._hasher.stop()
            raise
        try:
            self._base = self._staging.path
            shards = plan_shards(all_tensors(manifest), max_shard_bytes)
            written = self._progress.take_up(self._base, [shard.name for shard in shards])
            for shard in shards:
                self._shards.append(OpenShard(shard, self._base, written))
                self._places |= {place.spec.name: (self._shards[-1], place) for place in shard.tensors}
            self._hash_fronts()
            self._write_sealed(MANIFEST_FILE, text.encode())
            self._write_sealed(INDEX_FILE, index_text(shards).encode())
        except BaseException:
            self.abort()
            raise

    @property
    def resumed(self) -> Progress | None:
        """What an interrupted writer saved, where this one goes on from there: its tensors are written."""
        return self._progress.resumed

    @property
    def path(self) -> Path:
        """Where the files are now: `OUT.partial`, or OUT once sealed."""
        return self._base

    @property
    def lock(self) -> int:
        """Descriptor of the lock: a process that inherits it keeps others out for as long as it lives."""
        return self._staging.lock

    @property
    def missing(self) -> list[str]:
        """Tensors not written yet, in file order."""
        return [name for name, (shard, _) in self._places.items() if name not in shard.written]

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor.

        Args:
            name: one of `layout.all_tensors(manifest)`, each once, in any order (file order is fastest).
            tensor: of exactly the dtype and shape the layout gives it; any device.

        Raises:
            ArtifactError: unknown name, second writing, wrong dtype or shape, or the disk refuses.
        """
        spec = self._place(name)[1].spec
        if tuple(tensor.shape) != spec.shape:
            raise self._mismatch(name, tensor, str(spec.shape))
        self.write_rows(name, 0, tensor)

    def write_rows(self, name: str, start: int, rows: Tensor) -> None:
        """Write a part of a tensor: the rows, along its first axis, from `start` on.

        Args:
            name: as for `write`.
            start: 0 for the first row. Every row is written once, the parts in any order.
            rows: of the dtype the layout gives the tensor, and but for the first axis its shape; any device.

        Raises:
            ArtifactError: unknown name, rows written already, wrong dtype or shape, or the disk refuses.
        """
        shard, place = self._place(name)
        spec = place.spec
        count = rows.shape[0] if rows.dim() else 0
        if (
            rows.dtype != TORCH_DTYPES[spec.dtype]
            or tuple(rows.shape[1:]) != spec.shape[1:]
            or not 0 <= start < start + count <= spec.shape[0]
        ):
            raise self._mismatch(name, rows, f"{spec.shape} or rows of it at {start}")
        with self._lock:
            parts = self._parts.setdefault(name, _Parts())
            if start in parts.starts or parts.claimed + count > spec.shape[0]:
                raise ArtifactError(f"{shard.path}: tensor {name}, rows {start} to {start + count}: written already")
            parts.starts.add(start)
            parts.claimed += count
        shard.write(place, rows, start * (spec.nbytes // spec.shape[0]))
        with self._lock:
            parts.written += count
            if parts.written == spec.shape[0]:
                self._advance(shard, name)

    def count_written(self, names: Iterable[str]) -> None:
        """Take tensors for written, as they are by another process through `ShardRows`.

        Raises:
            ArtifactError: unknown name, or written already.
        """
        for name in names:
            shard, place = self._place(name)
            with self._lock:
                if name in self._parts:
                    raise ArtifactError(f"{shard.path}: tensor {name}: written already")
                rows = place.spec.shape[0]
                self._parts[name] = _Parts(claimed=rows, written=rows)
                self._advance(shard, name)

    def save(self, state: Mapping[str, Any], tensors: Mapping[str, Iterable[Tensor]] | None = None) -> None:
        """Record that every tensor begun is whole, so that another writer can go on from here.

        Call it when no other thread is writing.

        Args:
            state: JSON-ready, what the caller needs to go on.
            tensors: name -> host tensors whose bytes `saved_file` gives back.

        Raises:
            ArtifactError: a tensor is written in part, or while one before it in the file is not; or the disk refuses,
                or does not hold any more what an interrupted writer wrote.
        """
        self._check_open()
        written = [name for shard in self._shards for name in shard.written]
        partly = sorted(self._parts.keys() - set(written))
        if partly:
            raise ArtifactError(f"{self._base}: tensor {partly[0]} is written in part")
        for shard in self._shards:
            if shard.beyond_gap:
                raise ArtifactError(f"{shard.path}: tensor {shard.beyond_gap} is written, but not those before it")
            shard.flush()
        with os_errors(self._base, "cannot be read back or flushed"):
            digests = self._hasher.reached()
        hashes = {shard.shard.name: digests[shard.descriptor] for shard in self._shards if shard.written}
        self._progress.save(self._base, written, hashes, state, tensors or {})
        self._staging.keeping = True

    def saved_file(self, name: str) -> Path:
        """File that holds the bytes of the tensors saved under a name by the writer that this one goes on from.

        Raises:
            ArtifactError: it cannot be read, or holds others now.
        """
        return self._progress.saved_file(self._base, name)

    def work_file(self, name: str) -> Path:
        """A path for a file of the caller's that is of no use to anybody once the writer is gone.

        Raises:
            ArtifactError: its directory cannot be made.
        """
        directory = self._base / PROGRESS_DIRECTORY
        with os_errors(directory, "cannot be made"):
            directory.mkdir(exist_ok=True)
        return directory / f"{name}.work"

    @property
    def input_directory(self) -> Path:
        """Where to keep what the artifact is made from, if it comes bit by bit: it lasts as long as what is saved."""
        return self._base / PROGRESS_DIRECTORY / INPUT_DIRECTORY

    def copy_side_file(self, source: Path | bytes, relative_name: str) -> None:
        """Copy a tokenizer, config or licence file byte for byte into the sealed set.

        Args:
            source: the file, or its content. The file may be a link only to a place inside its own checkpoint (or in
                the blobs of the Hub's cache).
            relative_name: its name in the artifact, one of `manifest.side_files`.

        Raises:
            ArtifactError: unsafe name, a name the manifest does not list, a link out of the checkpoint, no such file.
        """
        self._check_open()
        if relative_name not in self._side_names:
            raise ArtifactError(f"{self._base}: side file {relative_name!r} is not among the manifest's side_files")
        if not isinstance(source, bytes):
            parts = PurePosixPath(relative_name).parts
            named = source.parts[-len(parts) :] == parts
            root = source.parents[len(parts) - 1] if named else source.parent
            with os_errors(source, "cannot be read"):
                source = inside(root, relative_name if named else source.name).read_bytes()
        self._write_sealed(relative_name, source)

    def write_log(self, name: str, content: str | bytes) -> None:
        """Write a file outside the sealed set (timings, reports and their plots), also after sealing.

        Raises:
            ArtifactError: unsafe name or a name of the sealed set, or the disk refuses.
        """
        check_foreign_name(name, str(self._base))
        if name in self._side_names:
            raise ArtifactError(f"{self._base}: log {name!r} has the name of a side file")
        write_file(self._base / name, content.encode() if isinstance(content, str) else content)

    def seal(self) -> Path:
        """Finish the artifact: hashes, marker, name. Returns OUT.

        Raises:
            ArtifactError: tensors or side files are missing, or the disk refuses.
        """
        self._check_open()
        missing = self.missing
        if missing:
            raise ArtifactError(f"{self._base}: {len(missing)} tensors are not written, the first is {missing[0]}")
        lacking = sorted(self._side_names - set(self._hashes))
        if lacking:
            raise ArtifactError(f"{self._base}: side files of the manifest are not copied: {lacking}")
        with os_errors(self._base, "cannot be read back or flushed"):
            digests = self._hasher.finish()
        self._hashes |= {shard.shard.name: digests[shard.descriptor] for shard in self._shards}
        self._close()
        files = files_text(self._hashes)
        write_file(self._base / FILES_FILE, files.encode())
        write_file(self._base / MARKER_FILE, marker_text(files).encode())
        self._base = self._staging.publish()
        self._finished = True
        return self._base

    def forget(self) -> None:
        """Have `abort` remove what was saved as well, where going on from there would only fail again."""
        self._staging.keeping = False

    def abort(self) -> None:
        """Stop, and remove `OUT.partial` unless something was saved; does nothing once sealed."""
        if not self._finished:
            self._finished = True
            self._hasher.stop()
            self._close()
            self._staging.abort()

    def __enter__(self) -> ArtifactWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _advance(self, shard: OpenShard, name: str) -> None:
        """Have hashed what a tensor that is whole now has closed the last gap before."""
        before = shard.front
        with os_errors(shard.path, "cannot be read back or flushed"):
            shard.advance(name)
            if shard.front > before:
                self._hasher.advance(shard.descriptor, shard.front, shard.shard.nbytes)

    def _hash_fronts(self) -> None:
        """Have what an interrupted writer has written hashed, and compared with what it was."""
        for shard in self._shards:
            for name in shard.written:
                rows = self._places[name][1].spec.shape[0]
                self._parts[name] = _Parts(claimed=rows, written=rows)
            if shard.written and self._progress.resumed is not None:
                sha256 = self._progress.resumed.hashes[shard.shard.name]
                self._hasher.take_up(shard.descriptor, shard.front, shard.shard.nbytes, shard.path, sha256)

    def _check_open(self) -> None:
        if self._finished:
            raise ArtifactError(f"{self._base}: the artifact is sealed or given up already")

    def _place(self, name: str) -> tuple[OpenShard, TensorPlace]:
        self._check_open()
        if name not in self._places:
            raise ArtifactError(f"{self._base}: the manifest has no tensor {name!r}")
        return self._places[name]

    def _mismatch(self, name: str, found: Tensor, expected: str) -> ArtifactError:
        shard, place = self._places[name]
        return ArtifactError(
            f"{shard.path}: tensor {name} is {found.dtype} {tuple(found.shape)}, "
            f"expected {TORCH_DTYPES[place.spec.dtype]} {expected} from the manifest"
        )

    def _write_sealed(self, name: str, data: bytes) -> None:
        write_file(self._base / name, data)
        self._hashes[name] = hash_bytes(data)

    def _close(self) -> None:
        for shard in self._shards:
            shard.close()
