"""Disks that fill up and disks that go away while a conversion runs."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

#: What takes space on a disk, or finds out when flushing that there is none.
_CALLS = ("pwrite", "fsync", "fdatasync", "replace", "rename", "mkdir", "open", "ftruncate")


@contextmanager
def full_disk(at: int | None) -> Iterator[list[int]]:
    """From the `at`-th call on that needs space, every one fails for want of it; the first of them does half its work.

    Yields a list of one number: the calls so far. With None nothing fails.
    """
    calls = [0]

    def full() -> bool:
        calls[0] += 1
        return at is not None and calls[0] >= at

    class FullFile(io.FileIO):
        def write(self, data: Any) -> int:
            if full():
                if calls[0] == at:
                    super().write(memoryview(data)[: len(data) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    def opened(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "w" not in mode:
            return open(path, mode, *args, **kwargs)
        assert mode == "wb"
        if full():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return FullFile(path, "w")

    def failing(name: str) -> Any:
        original = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            flags = kwargs.get("flags", args[1] if len(args) > 1 else 0)
            if name == "open" and not flags & os.O_CREAT:
                return original(*args, **kwargs)
            if full():
                if name == "pwrite" and calls[0] == at:
                    return original(args[0], args[1][: max(1, len(args[1]) // 2)], args[2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in _CALLS:
            patch.setattr(os, name, failing(name))
        patch.setattr(Path, "open", opened)
        yield calls


@contextmanager
def lost_source(directory: Path, at: int | None, code: int = errno.EIO) -> Iterator[list[int]]:
    """From the `at`-th read of a file in `directory` on, every one fails, and so does opening one; else as above."""
    calls, root = [0], directory.resolve()

    def lost(path: Path) -> bool:
        if not path.is_relative_to(root):
            return False
        calls[0] += 1
        return at is not None and calls[0] >= at

    def failing(name: str) -> Any:
        original = getattr(os, name)

        def call(target: Any, *args: Any, **kwargs: Any) -> Any:
            path = Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else Path(target)
            if lost(path):
                raise OSError(code, os.strerror(code), str(path))
            return original(target, *args, **kwargs)

        return call

    def opened(path: Path, *args: Any, **kwargs: Any) -> Any:
        if lost(path):
            raise OSError(code, os.strerror(code), str(path))
        return open(path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("pread", "preadv", "open"):
            patch.setattr(os, name, failing(name))
        patch.setattr(Path, "open", opened)
        yield calls
