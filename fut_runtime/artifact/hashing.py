"""SHA-256 of files and of each of their 64 MiB chunks, after the fact or while they are being written."""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fut_runtime.errors import ArtifactError

CHUNK_BYTES = 64 << 20
_BLOCK_BYTES = 4 << 20
#: Bytes after which a file being written is flushed and dropped from the page cache: a long conversion then neither
#: fills the memory with pages nobody will read soon, nor waits minutes for the disk at its end. Soon enough, the same
#: few pages are used again and again, which costs a virtual machine half the time that fresh ones do.
_FLUSH_BYTES = 64 << 20


@dataclass(frozen=True)
class FileHash:
    """Size in bytes, SHA-256 of the whole and of each 64 MiB chunk (the last one shorter), as hex digits."""

    size: int
    sha256: str
    chunks: tuple[str, ...]


class RunningHash:
    """The digests of a file whose bytes arrive in order."""

    def __init__(self) -> None:
        self.size = 0
        self._whole = hashlib.sha256()
        self._chunk = hashlib.sha256()
        self._chunks: list[str] = []

    def update(self, data: memoryview) -> None:
        """Append bytes."""
        self._whole.update(data)
        while data:
            taken = data[: CHUNK_BYTES - self.size % CHUNK_BYTES]
            self._chunk.update(taken)
            self.size += len(taken)
            if self.size % CHUNK_BYTES == 0:
                self._chunks.append(self._chunk.hexdigest())
                self._chunk = hashlib.sha256()
            data = data[len(taken) :]

    def result(self) -> FileHash:
        """The digests of everything appended so far."""
        tail = [self._chunk.hexdigest()] if self.size % CHUNK_BYTES else []
        return FileHash(self.size, self._whole.hexdigest(), (*self._chunks, *tail))


def hash_bytes(data: bytes) -> FileHash:
    """Digests of a file with this content."""
    running = RunningHash()
    running.update(memoryview(data))
    return running.result()


def hash_file(path: Path, progress: Callable[[int], None] | None = None) -> FileHash:
    """Digests of a file. `progress` is told the bytes read by each step.

    Raises:
        OSError: the file cannot be read.
    """
    running = RunningHash()
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            running.update(buffer[:count])
            if progress is not None:
                progress(count)
    return running.result()


class FollowingHasher:
    """Hashes files in one background thread, following the front up to which each has been written.

    The thread reads back what was just written, which the page cache still holds, so that no tensor has to stay in
    memory for it and tensors may be written in any order. It also flushes what it has hashed to the disk, so that
    little is left to wait for at the end.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[int, int, int] | threading.Event | None] = queue.SimpleQueue()
        self._expected: dict[int, tuple[Path, str]] = {}
        self._running: dict[int, RunningHash] = {}
        self._flushed: dict[int, int] = {}
        self._error: Exception | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="fut-hash", daemon=True)
        self._thread.start()

    def advance(self, descriptor: int, front: int, size: int) -> None:
        """Say that bytes 0 … `front` of an open file of final size `size` are written.

        Raises:
            OSError: an earlier read or flush in the background failed.
            ArtifactError: what `take_up` had checked is not what was written.
        """
        self._raise_error()
        self._work.put((descriptor, front, size))

    def take_up(self, descriptor: int, front: int, size: int, path: Path, sha256: str) -> None:
        """As `advance`, for a file of which an earlier run wrote bytes 0 … `front`: they must have this SHA-256."""
        self._expected[descriptor] = path, sha256
        self.advance(descriptor, front, size)

    def reached(self) -> dict[int, str]:
        """Wait until all that is written without a gap is hashed; the SHA-256 of that by descriptor.

        Raises:
            OSError, ArtifactError: as `advance`.
        """
        done = threading.Event()
        self._work.put(done)
        done.wait()
        self._raise_error()
        return {descriptor: running.result().sha256 for descriptor, running in self._running.items()}

    def finish(self) -> dict[int, FileHash]:
        """Wait for the thread and return the digests by descriptor.

        Raises:
            OSError, ArtifactError: as `advance`.
        """
        self.stop(drain=True)
        self._raise_error()
        return {descriptor: running.result() for descriptor, running in self._running.items()}

    def stop(self, *, drain: bool = False) -> None:
        """End the thread; without `drain` what is still queued is dropped."""
        self._stopped = self._stopped or not drain
        self._work.put(None)
        self._thread.join()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        buffer = memoryview(bytearray(_BLOCK_BYTES))
        while (item := self._work.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            if self._error is not None:
                continue
            try:
                self._follow(*item, buffer)
            except Exception as error:
                self._error = error

    def _follow(self, descriptor: int, front: int, size: int, buffer: memoryview) -> None:
        running = self._running.setdefault(descriptor, RunningHash())
        while running.size < front and not self._stopped:
            count = os.preadv(descriptor, [buffer[: front - running.size]], running.size)
            if count == 0:
                raise OSError(f"file descriptor {descriptor} ends at byte {running.size}, expected {front} bytes")
            running.update(buffer[:count])
            flushed = self._flushed.get(descriptor, 0)
            if running.size - flushed >= _FLUSH_BYTES:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, flushed, running.size - flushed, os.POSIX_FADV_DONTNEED)
                self._flushed[descriptor] = running.size
        if self._stopped:
            return
        if descriptor in self._expected:
            path, sha256 = self._expected.pop(descriptor)
            check_saved(path, running.size, running.result().sha256, sha256)
        if running.size == size:
            os.fsync(descriptor)


def check_saved(path: Path, size: int, found: str, expected: str) -> None:
    """Check that what an interrupted run has saved is still what it was; ArtifactError otherwise."""
    if found != expected:
        raise ArtifactError(
            f"{path}: its first {size} bytes have SHA-256 {found}, expected {expected} from when they were saved; the "
            "file was changed, or its disk is failing: begin anew with --restart"
        )
