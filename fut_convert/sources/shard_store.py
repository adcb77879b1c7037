"""One shard's place on the disk: whole, or what is left of it once most of its tensors have been read.

The whole file has the hash that the Hub gives. What is left carries its own in the header, so that a later run does not
go on with what the disk has changed meanwhile, but fetches it again.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fut_convert.errors import CheckpointError
from fut_convert.sources.base import TensorInfo
from fut_convert.sources.safetensors_file import SafetensorsFile
from fut_runtime.artifact.staging import fsync_directory, os_errors
from fut_runtime.hub.cached_files import matches

#: The header of what is left begins so; then follows the SHA-256, in hex digits, of everything behind it.
_BEGIN = b'{"__metadata__": {"sha256": "'
_DIGITS = 64
_COPY_BYTES = 16 << 20


class ShardStore:
    """The files of one shard in the directory of a streamed conversion.

    Attributes:
        whole: where the shard arrives under this name once it is whole.
    """

    def __init__(self, name: str, place: Path) -> None:
        """Find what an earlier run left of the shard `name` at `place`, a path of the store's own."""
        self.name = name
        self.whole = place
        self._rest = place.with_name(f"{place.name}.rest")
        self._file: SafetensorsFile | None = None
        self._readers = 0
        self._idle = threading.Condition()

    def take_up(self, needed: Iterable[str], oid: str) -> bool:
        """As `open`, for what an earlier run left; `oid` is the hash of the whole shard. What is damaged goes."""
        if self.whole.exists() and not matches(self.whole, oid):
            self.whole.unlink()
        if self._rest.exists() and not _is_intact(self._rest):
            self._rest.unlink()
        return self.open(needed)

    def open(self, needed: Iterable[str]) -> bool:
        """Open the file that holds all these tensors; False where there is none yet. What is of no use goes."""
        names = set(needed)
        for path in (self.whole, self._rest):
            if self._file is None and path.exists():
                try:
                    found = SafetensorsFile(path, self.name)
                except CheckpointError:
                    path.unlink()
                    continue
                if names <= set(found.tensors) and not found.problems:
                    self._file = found
                else:
                    found.close()
                    path.unlink()
        return self._file is not None

    @property
    def tensors(self) -> set[str]:
        """The tensors that are there."""
        return set() if self._file is None else set(self._file.tensors)

    @contextmanager
    def reading(self, tensor: str) -> Iterator[SafetensorsFile | None]:
        """The file that holds a tensor, which stays meanwhile; None where there is none."""
        with self._idle:
            file = self._file if self._file is not None and tensor in self._file.tensors else None
            self._readers += file is not None
        try:
            yield file
        finally:
            with self._idle:
                self._readers -= file is not None
                self._idle.notify_all()

    def reduce(self, tensors: Sequence[str]) -> None:
        """Keep these tensors and no others, or nothing at all.

        Raises:
            ArtifactError: the disk refuses.
            ReadError: it does not give back what it holds.
        """
        with self._idle:
            self._idle.wait_for(lambda: self._readers == 0)
            old, self._file = self._file, None
            if old is None:
                return
            try:
                if tensors:
                    self._copy(old, [old.tensors[name] for name in tensors])
                    self._file = SafetensorsFile(self._rest, self.name)
            finally:
                old.close()
            with os_errors(self.whole, "cannot be removed"):
                self.whole.unlink(missing_ok=True)
                if not tensors:
                    self._rest.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; what is on the disk stays."""
        with self._idle:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _copy(self, old: SafetensorsFile, tensors: Sequence[TensorInfo]) -> None:
        """Write the rest as a safetensors file of its own."""
        entries: dict[str, Any] = {"__metadata__": {"sha256": _DIGITS * "0"}}
        end = 0
        for info in tensors:
            entries[info.name] = {
                "dtype": info.dtype, "shape": info.shape, "data_offsets": [end, end + info.nbytes]
            }  # fmt: skip
            end += info.nbytes
        text = json.dumps(entries).encode()
        digest = hashlib.sha256(text[len(_BEGIN) + _DIGITS :])
        new = self._rest.with_name(f"{self._rest.name}.new")
        buffer = memoryview(bytearray(min(_COPY_BYTES, max(info.nbytes for info in tensors))))
        with os_errors(new, "cannot be written"):
            with new.open("wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                for info in tensors:
                    for start in range(0, info.nbytes, len(buffer)):
                        part = buffer[: info.nbytes - start]
                        old.read_into(part, info.name, start)
                        digest.update(part)
                        file.write(part)
                file.seek(8 + len(_BEGIN))
                file.write(digest.hexdigest().encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self._rest)
            fsync_directory(self._rest.parent)


def _is_intact(path: Path) -> bool:
    """Whether what is left of a shard is as it was written."""
    with path.open("rb") as file:
        expected = file.read(8 + len(_BEGIN) + _DIGITS)[-_DIGITS:]
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest().encode() == expected
