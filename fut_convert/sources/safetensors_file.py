"""One safetensors file: its header checked, its tensors read with `pread` into memory of their own.

Mapping the file instead would count every page touched as resident memory of this process, up to the whole checkpoint.
"""

from __future__ import annotations

import os
from pathlib import Path

from fut_convert.errors import ReadError
from fut_convert.sources.read_errors import read_errors
from fut_convert.sources.safetensors_header import SafetensorsReader, read_header


class SafetensorsFile(SafetensorsReader):
    """An open safetensors file.

    Raises:
        CheckpointError: the header cannot be understood.
        ReadError: the file cannot be opened or read.
    """

    def __init__(self, path: Path, name: str) -> None:
        try:
            self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ReadError(f"{name}: cannot be opened ({error.strerror})") from error
        descriptor = self._descriptor
        try:
            with read_errors(name):
                size = os.fstat(descriptor).st_size
                header = read_header(name, size, lambda offset, length: os.pread(descriptor, length, offset))
        except BaseException:
            self.close()
            raise
        super().__init__(name, header)

    def read_into(self, buffer: memoryview, tensor: str, skip: int) -> None:
        if self._descriptor is None:
            raise ReadError(f"{self.name}: already closed")
        offset, filled = self.header.offsets[tensor] + skip, 0
        while filled < len(buffer):
            # One call reads at most 2 GiB, and may read less.
            with read_errors(self.name):
                count = os.preadv(self._descriptor, [buffer[filled:]], offset + filled)
            if count == 0:
                raise ReadError(
                    f"{self.name}: ends inside {tensor}, {len(buffer) - filled} bytes early; download the file again"
                )
            filled += count
        # Nobody reads it twice, and reading the next tensor into the same pages takes half the time of fresh ones.
        os.posix_fadvise(self._descriptor, offset, filled, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
