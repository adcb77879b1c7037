"""A directory that appears under its name whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from fut_runtime.artifact.paths import LOCK_FILE, MANIFEST_FILE, PROGRESS_DIRECTORY
from fut_runtime.artifact.remains import put_back_replaced, replaced_path
from fut_runtime.errors import ArtifactError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class StagingDirectory:
    """Files are written to `OUT.partial`, locked against a second writer, and renamed to `OUT` at the end.

    What an interrupted run left in `OUT.partial` is removed first, unless it is to be continued; an existing `OUT` is
    replaced at the very end, and only if it is an artifact (or, with `replaces`, holds that file), never some other
    directory.

    Attributes:
        keeping: whether `abort` leaves `OUT.partial` for a later run.
    """

    def __init__(
        self,
        out: Path,
        *,
        overwrite: bool = False,
        replaces: str = MANIFEST_FILE,
        resumes: Callable[[Path], bool] = lambda _: False,
    ) -> None:
        """Lock `OUT.partial`, and clear it unless it is to be continued.

        Args:
            out: directory to create.
            overwrite: whether an existing `out` is replaced.
            replaces: a file that an existing `out` must hold to be ours.
            resumes: resumes(OUT.partial) -> whether what lies there is to be continued. Where it raises, it stays.

        Raises:
            ArtifactError: OUT exists, another process is writing to it, or the directory cannot be made.
        """
        check_target(out, overwrite=overwrite, replaces=replaces)
        self.out = out.parent.resolve() / out.name
        self.path = staging_path(self.out)
        self._overwrite = overwrite
        self._replaces = replaces
        self.keeping = False
        self._lock: int | None = None
        try:
            with os_errors(self.path, "cannot be made"):
                self.out.parent.mkdir(parents=True, exist_ok=True)
                self._lock = self._acquire()
            # Hours of work may lie there: until it is known that nobody wants them, no failure removes them.
            self.keeping = (self.path / PROGRESS_DIRECTORY).is_dir()
            with os_errors(self.out, "cannot be put back"):
                put_back_replaced(self.out)
            # Another process may have published while this one waited for the lock.
            check_target(self.out, overwrite=overwrite, replaces=replaces)
            self.keeping = resumes(self.path)
            if not self.keeping:
                with os_errors(self.path, "cannot be cleared"):
                    self._clear()
        except BaseException:
            self.abort()
            raise

    @property
    def lock(self) -> int:
        """Descriptor of the lock, while it is held."""
        if self._lock is None:
            raise ValueError(f"{self.path} is not locked any more")
        return self._lock

    def publish(self) -> Path:
        """Flush directories, rename to OUT and release the lock; returns OUT.

        Raises:
            ArtifactError: OUT has appeared meanwhile, or a file system operation failed.
        """
        check_target(self.out, overwrite=self._overwrite, replaces=self._replaces)
        old = replaced_path(self.out)
        with os_errors(self.out, "cannot be put in place"):
            for directory, _, _ in os.walk(self.path):
                fsync_directory(Path(directory))
            replacing = self.out.is_dir() and any(self.out.iterdir())
            if replacing:
                os.rename(self.out, old)
            try:
                os.rename(self.path, self.out)
            except OSError:
                if replacing:
                    os.rename(old, self.out)
                raise
            # Not before: without the lock, a second writer would clear what is about to be renamed.
            shutil.rmtree(self.out / PROGRESS_DIRECTORY, ignore_errors=True)
            (self.out / LOCK_FILE).unlink()
            fsync_directory(self.out.parent)
            self._release()
            if replacing:
                # A second writer may have taken it away already.
                shutil.rmtree(old, ignore_errors=True)
        return self.out

    def abort(self) -> None:
        """Remove `OUT.partial`, unless it is kept, and release the lock; does nothing once published or aborted."""
        if self._lock is not None:
            if not self.keeping:
                shutil.rmtree(self.path, ignore_errors=True)
            self._release()

    def _acquire(self) -> int:
        while True:
            if self.path.is_symlink():
                raise ArtifactError(f"{self.path}: is a link; remove it")
            if self.path.exists() and not self.path.is_dir():
                raise ArtifactError(f"{self.path}: is no directory, but the artifact is made there; remove it")
            self.path.mkdir(exist_ok=True)
            if not (self.path / LOCK_FILE).exists() and any(self.path.iterdir()):
                raise ArtifactError(
                    f"{self.path}: was not made by this program (it holds no {LOCK_FILE}) and will not be cleared; "
                    "remove it yourself or choose another output name"
                )
            try:
                lock = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            except FileNotFoundError:
                continue  # the other process has published or aborted since
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                error = _in_use(self.out, lock)
                os.close(lock)
                raise error from None
            # The same may have happened between opening and locking: then this lock guards a file that is gone.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(self.path / LOCK_FILE)):
                    os.ftruncate(lock, 0)
                    os.pwrite(lock, f"pid {os.getpid()}".encode(), 0)
                    return lock
            os.close(lock)

    def _clear(self) -> None:
        for entry in self.path.iterdir():
            if entry.name == LOCK_FILE:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def staging_path(out: Path) -> Path:
    """Where the files of `out` lie until it is whole.

    Raises:
        ArtifactError: OUT has no name.
    """
    if out.name in ("", ".", ".."):
        raise ArtifactError(f"{out}: has no name of its own; give the directory to create by its name")
    return out.with_name(out.name + ".partial")


def check_unlocked(out: Path) -> None:
    """Check that nobody writes `out` at this moment, for a refusal before any work: the lock itself is taken later.

    Raises:
        ArtifactError: another process is writing it, or it has no name.
    """
    place = staging_path(out)
    try:
        lock = os.open(place / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(out, lock) from None
    finally:
        os.close(lock)


def staged_bytes(out: Path) -> int:
    """Bytes on the disk that an interrupted run left of `out`: a later one clears them away, or goes on with them."""
    place = staging_path(out)
    return sum(p.lstat().st_blocks * 512 for p in place.rglob("*")) if place.is_dir() else 0


def check_target(out: Path, *, overwrite: bool = False, replaces: str = MANIFEST_FILE) -> None:
    """Check that a directory `out` may be made, or replaced; arguments as for `StagingDirectory`.

    Raises:
        ArtifactError: OUT has no name, is a link or a file, exists, or is a directory that is not ours to replace.
    """
    staging_path(out)
    if out.is_symlink():
        raise ArtifactError(f"{out}: is a link; remove it, or name the directory it points to")
    if not out.exists():
        return
    if not out.is_dir():
        raise ArtifactError(f"{out}: is a file, expected no such name yet or an empty directory")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise ArtifactError(f"{out}: exists already; choose another name, or allow to replace it with --overwrite")
    if not (out / replaces).exists():
        raise ArtifactError(
            f"{out}: will not be replaced, for it holds no {replaces} and so was not made by this program; "
            "remove it yourself or choose another name"
        )


def check_outside(source: Path, out: Path) -> None:
    """Check that replacing `out` will not take away what the new one is made from.

    Raises:
        ArtifactError: `source` lies inside `out`. (The same directory is no mistake: it is read before it goes.)
    """
    if out.resolve() in source.resolve().parents:
        raise ArtifactError(f"{out}: holds {source}, which would be deleted with it; choose another output name")


def _in_use(out: Path, lock: int) -> ArtifactError:
    holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
    return ArtifactError(
        f"{out}: is being written by another process ({holder or 'unknown'}); wait for it, stop it, or choose another "
        "name"
    )


@contextlib.contextmanager
def os_errors(path: Path, what: str) -> Iterator[None]:
    """Turn an OSError into an ArtifactError that names the file and, on a full disk, the space that is left."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            free = shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free
            raise ArtifactError(
                f"{path}: {what}: the disk is full ({free / 1e9:.2f} GB left); free space or choose another disk. "
                "Nothing that could be taken for a whole artifact was left"
            ) from error
        raise ArtifactError(f"{path}: {what} ({error.strerror or error})") from error


def write_file(path: Path, data: bytes) -> None:
    """Write a small file and flush it to the disk; its directory is made where needed.

    Raises:
        ArtifactError: the file system refused, a full disk included.
    """
    with os_errors(path, "cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def fsync_directory(path: Path) -> None:
    """Flush a directory's entries to the disk: new names, and names that are gone."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
