"""Reads tensors of an artifact into one block of device memory, through pinned buffers and several threads.

Each thread reads pieces of the shards into pinned memory and has its own stream copy them to the device while it reads
on. Pieces of different shards are taken in turn, so that several files are read at once.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fut_runtime.artifact.layout import TensorSpec, round_up
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.shards import TORCH_DTYPES
from fut_runtime.errors import ArtifactError

#: Every tensor begins at a multiple of this: bulk copies need 16, and whole cache lines are read faster.
TENSOR_ALIGN = 256
#: Bytes of one read, and of one pinned buffer; a thread has two.
PIECE_BYTES = 8 << 20
THREADS = 8
#: Bytes between two tensors of a file that are read along rather than skipped.
_GAP_BYTES = 64 << 10


@dataclass(frozen=True)
class Part:
    """A run of bytes inside a piece: where it begins there, where it goes in the arena, and its length."""

    piece_offset: int
    arena_offset: int
    nbytes: int


@dataclass(frozen=True)
class Piece:
    """One read of a file, and the parts of it that go to the arena."""

    file: Path
    offset: int
    nbytes: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class ArenaPlan:
    """Where tensors lie in one block of memory: offset of each in bytes, and bytes in all.

    A tensor may be asked for with more rows than the artifact has; the rest is zero.
    """

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> ArenaPlan:
        """Place tensors one after another."""
        specs = tuple(specs)
        ends = list(itertools.accumulate((round_up(spec.nbytes, TENSOR_ALIGN) for spec in specs), initial=0))
        return cls(specs, tuple(ends[:-1]), ends[-1])

    def views(self, arena: Tensor) -> dict[str, Tensor]:
        """The tensors in an arena, uint8 [nbytes], by name."""
        return {
            spec.name: arena[offset : offset + spec.nbytes].view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
            for spec, offset in zip(self.specs, self.offsets, strict=True)
        }

    def pieces(self, artifact: Artifact) -> list[Piece]:
        """The reads that fill the arena; those of different shards take turns.

        Raises:
            ArtifactError: the artifact holds a tensor otherwise than it was planned for.
        """
        places = {
            place.spec.name: (shard, place.offset, place.spec)
            for shard, listed in artifact.shards.items()
            for place in listed
        }
        runs: dict[str, list[tuple[int, int, int]]] = {}
        for spec, arena_offset in zip(self.specs, self.offsets, strict=True):
            if spec.name not in places:
                raise ArtifactError(f"{artifact.path}: has no tensor {spec.name!r}")
            shard, offset, stored = places[spec.name]
            if (stored.dtype, stored.shape[1:]) != (spec.dtype, spec.shape[1:]) or stored.nbytes > spec.nbytes:
                raise ArtifactError(
                    f"{artifact.path / shard}: tensor {spec.name!r} is {stored.dtype} {list(stored.shape)}, expected "
                    f"{spec.dtype} {list(spec.shape)}"
                )
            runs.setdefault(shard, []).append((offset, arena_offset, stored.nbytes))
        by_shard = [_cut(artifact.path / shard, sorted(found)) for shard, found in sorted(runs.items())]
        return [piece for turn in itertools.zip_longest(*by_shard) for piece in turn if piece is not None]


def _cut(file: Path, runs: Sequence[tuple[int, int, int]]) -> list[Piece]:
    """Pieces of at most PIECE_BYTES that cover runs (file offset, arena offset, bytes), sorted by file offset."""
    pieces: list[Piece] = []
    begin = end = 0
    parts: list[Part] = []

    def finish() -> None:
        if parts:
            pieces.append(Piece(file, begin, end - begin, tuple(parts)))
            parts.clear()

    for offset, arena_offset, nbytes in runs:
        done = 0
        while done < nbytes:
            start = offset + done
            if not parts or start > end + _GAP_BYTES or start - begin >= PIECE_BYTES:
                finish()
                begin = start
            take = min(nbytes - done, begin + PIECE_BYTES - start)
            parts.append(Part(start - begin, arena_offset + done, take))
            end = start + take
            done += take
    finish()
    return pieces


def fill(arena: Tensor, pieces: Sequence[Piece], *, threads: int = THREADS) -> None:
    """Read pieces into an arena, uint8 on any device; bytes that no piece covers are left alone.

    Raises:
        ArtifactError: a file cannot be read, or is shorter than it was when the artifact was opened.
    """
    if arena.device.type == "cuda":
        # The block may have been another tensor's, and work that was queued with that must not meet ours.
        torch.cuda.current_stream(arena.device).synchronize()
    queue = iter(pieces)
    lock = threading.Lock()
    stop = threading.Event()

    def work() -> None:
        reader = _Reader(arena)
        try:
            while not stop.is_set():
                with lock:
                    piece = next(queue, None)
                if piece is None:
                    break
                reader.copy(piece)
        except BaseException:
            stop.set()
            raise
        finally:
            reader.finish()

    with ThreadPoolExecutor(max_workers=max(1, min(threads, len(pieces))), thread_name_prefix="fut-load") as pool:
        workers = [pool.submit(work) for _ in range(max(1, min(threads, len(pieces))))]
        try:
            for worker in workers:
                worker.result()
        except BaseException:
            stop.set()
            raise


class _Reader:
    """One thread's buffers, open files and stream."""

    def __init__(self, arena: Tensor) -> None:
        self._arena = arena
        self._cuda = arena.device.type == "cuda"
        self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(2)]
        self._stream = torch.cuda.Stream(arena.device) if self._cuda else None
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._files: dict[Path, int] = {}

    def copy(self, piece: Piece) -> None:
        """Read a piece and hand it to the device; returns before the device has it."""
        turn, self._turn = self._turn, 1 - self._turn
        event = self._copied[turn]
        if event is not None:
            event.synchronize()
        buffer = self._buffers[turn]
        self._read(piece, buffer)
        if self._stream is None:
            self._scatter(piece, buffer)
            return
        with torch.cuda.stream(self._stream):
            self._scatter(piece, buffer)
            self._copied[turn] = self._stream.record_event()

    def finish(self) -> None:
        """Wait for the device and close the files."""
        if self._stream is not None:
            self._stream.synchronize()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _scatter(self, piece: Piece, buffer: Tensor) -> None:
        for part in piece.parts:
            source = buffer[part.piece_offset : part.piece_offset + part.nbytes]
            self._arena[part.arena_offset : part.arena_offset + part.nbytes].copy_(source, non_blocking=True)

    def _read(self, piece: Piece, buffer: Tensor) -> None:
        view = memoryview(buffer.numpy().data)[: piece.nbytes]
        try:
            if piece.file not in self._files:
                self._files[piece.file] = os.open(piece.file, os.O_RDONLY | os.O_CLOEXEC)
            done = 0
            while done < piece.nbytes:
                count = os.preadv(self._files[piece.file], [view[done:]], piece.offset + done)
                if count == 0:
                    raise ArtifactError(
                        f"{piece.file}: ends at byte {piece.offset + done}, expected at least "
                        f"{piece.offset + piece.nbytes}: the file has become shorter; fetch the artifact again"
                    )
                done += count
        except OSError as error:
            raise ArtifactError(f"{piece.file}: cannot be read ({error.strerror})") from error
