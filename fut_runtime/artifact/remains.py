"""What a process leaves that is killed at the very end, while it puts its directory in place of an older one.

The older one waits beside it under another name until the new one is there, and the lock and the record of the
progress go after the renaming: without the lock a second writer would clear what is about to be renamed.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
from pathlib import Path

from fut_runtime.artifact.paths import LOCK_FILE, MARKER_FILE, PROGRESS_DIRECTORY

_REPLACED = "replaced"


def replaced_path(out: Path) -> Path:
    """Where this process keeps an older `out` until the new one is in its place."""
    return out.with_name(f"{out.name}.{_REPLACED}-{os.getpid()}")


def put_back_replaced(out: Path) -> None:
    """Undo, or finish, what a killed process has begun: an older `out` that waits beside it goes back, or goes.

    The caller holds the lock of `out`, so nobody else is replacing it.
    """
    prefix = f"{out.name}.{_REPLACED}-"
    for older in sorted(out.parent.glob(f"{glob.escape(prefix)}*")):
        if not older.name.removeprefix(prefix).isdecimal() or older.is_symlink() or not older.is_dir():
            continue
        if out.exists():
            shutil.rmtree(older)
        else:
            os.rename(older, out)


def clear_behind_renaming(out: Path) -> None:
    """Remove the lock and the record of the progress from an `out` that is whole, if its writer was killed before."""
    if not (out / MARKER_FILE).is_file() or not (out / LOCK_FILE).is_file():
        return
    with contextlib.suppress(OSError):
        lock = os.open(out / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(out / PROGRESS_DIRECTORY, ignore_errors=True)
            (out / LOCK_FILE).unlink()
        finally:
            os.close(lock)
