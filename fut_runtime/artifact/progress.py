"""How far a half-written artifact is: what a later run needs to go on where this one stopped.

A directory `.fut_progress` in `OUT.partial` holds `progress.json`, replaced as a whole whenever a step is done, and the
files it names. It goes when the artifact is sealed. Record, files and the artifact's tensors have hashes, so that what
has changed on the disk meanwhile is not sealed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fut_runtime.artifact.hashing import check_saved, hash_file
from fut_runtime.artifact.paths import LOCK_FILE, PROGRESS_DIRECTORY
from fut_runtime.artifact.staging import fsync_directory, os_errors, write_file
from fut_runtime.errors import ArtifactError

_RECORD = "progress.json"
#: A directory beside the record whose contents its user looks after.
INPUT_DIRECTORY = "input"
_FORMAT_VERSION = 2
#: Differences that a message lists.
_MOST_SHOWN = 4


@dataclass(frozen=True)
class Progress:
    """A step that is done.

    Attributes:
        serial: counts the steps that were saved.
        inputs: what the artifact's bytes depend on, by name.
        written: tensors that are whole and on the disk.
        state: whatever else the writer's user needs to go on.
        files: name -> file in the progress directory, of data too large for `state`.
        hashes: SHA-256 of each of those files, and of each shard as far as it is written, by file name.
    """

    serial: int
    inputs: Mapping[str, Any]
    written: tuple[str, ...]
    state: Mapping[str, Any]
    files: Mapping[str, str]
    hashes: Mapping[str, str]


class ProgressKeeper:
    """Finds, continues and saves the progress of one half-written artifact.

    Attributes:
        resumed: what an interrupted run saved, once `continues` has found that it is to be continued.
    """

    def __init__(self, inputs: Mapping[str, Any] | None, *, restart: bool = False) -> None:
        """Prepare for an artifact made of `inputs`; with None nothing is continued or saved.

        Args:
            restart: throw away what an interrupted run saved, whatever its inputs.
        """
        self.resumed: Progress | None = None
        # As they will be read: tuples become lists.
        self._inputs = None if inputs is None else json.loads(json.dumps(inputs))
        self._restart = restart
        self._saved: Progress | None = None

    def continues(self, base: Path) -> bool:
        """Whether what lies in `base` was saved by a run with the same inputs and is to be continued.

        Raises:
            ArtifactError: it was saved by a run with other inputs.
        """
        progress = None if self._inputs is None or self._restart else read_progress(base)
        if progress is None or self._inputs is None:
            return False
        changed = differences(progress.inputs, self._inputs)
        if changed:
            raise ArtifactError(
                f"{base}: holds an unfinished artifact that was begun otherwise ({changed}); finish it with what it "
                "was begun with, throw it away with --restart, or choose another output name"
            )
        self.resumed = self._saved = progress
        return True

    def take_up(self, base: Path, shards: Iterable[str]) -> tuple[str, ...]:
        """Clear up behind the interrupted run, if there was one; returns the tensors it has written."""
        if self.resumed is None:
            return ()
        clear_leftovers(base, self.resumed, [LOCK_FILE, *shards])
        return self.resumed.written

    def save(
        self,
        base: Path,
        written: Iterable[str],
        shards: Mapping[str, str],
        state: Mapping[str, Any],
        tensors: Mapping[str, Iterable[Tensor]],
    ) -> None:
        """Record a step, see `save_progress`."""
        if self._inputs is None:
            raise ValueError("a writer without inputs saves nothing")
        self._saved = save_progress(base, self._saved, self._inputs, written, shards, state, tensors)

    def saved_file(self, base: Path, name: str) -> Path:
        """File that holds the bytes of the tensors that the interrupted run saved under a name.

        Raises:
            ArtifactError: it cannot be read, or holds others now.
        """
        if self.resumed is None:
            raise ValueError("this run continues no other")
        path = base / PROGRESS_DIRECTORY / self.resumed.files[name]
        with os_errors(path, "cannot be read"):
            found = hash_file(path)
        check_saved(path, found.size, found.sha256, self.resumed.hashes[path.name])
        return path


def read_progress(base: Path) -> Progress | None:
    """The progress recorded in a half-written artifact; None where there is none, or none that this version reads."""
    try:
        record = json.loads((base / PROGRESS_DIRECTORY / _RECORD).read_bytes())
        data = record["progress"]
        if record["format_version"] != _FORMAT_VERSION or record["sha256"] != _digest(data):
            return None
        return Progress(**{**data, "written": tuple(data["written"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def save_progress(
    base: Path,
    before: Progress | None,
    inputs: Mapping[str, Any],
    written: Iterable[str],
    shards: Mapping[str, str],
    state: Mapping[str, Any],
    tensors: Mapping[str, Iterable[Tensor]],
) -> Progress:
    """Record a step, after what it wrote is on the disk; a crash at any moment leaves this step's record or the last.

    Args:
        base: the half-written artifact.
        before: the progress recorded there.
        shards: SHA-256 of what is written of each shard, by file name.
        tensors: name -> host tensors whose bytes make its file.

    Raises:
        ArtifactError: the disk refuses.
    """
    directory = base / PROGRESS_DIRECTORY
    serial = 1 if before is None else before.serial + 1
    files = {name: f"{name}.{serial}" for name in tensors}
    with os_errors(directory, "cannot be made"):
        directory.mkdir(exist_ok=True)
    hashes = {files[name]: _write_tensors(directory / files[name], parts) for name, parts in tensors.items()}
    progress = Progress(serial, inputs, tuple(written), state, files, {**shards, **hashes})
    new = directory / f"{_RECORD}.new"
    data = json.loads(json.dumps(vars(progress)))
    record = {"format_version": _FORMAT_VERSION, "sha256": _digest(data), "progress": data}
    write_file(new, json.dumps(record).encode())
    with os_errors(new, "cannot be put in place"):
        # The files' names must be on the disk before the record that names them.
        fsync_directory(directory)
        os.replace(new, directory / _RECORD)
        fsync_directory(directory)
        fsync_directory(base)
    for old in {} if before is None else before.files.values():
        (directory / old).unlink(missing_ok=True)
    return progress


def clear_leftovers(base: Path, progress: Progress, kept: Iterable[str]) -> None:
    """Remove from a half-written artifact whatever is neither `kept` nor named by its progress.

    Raises:
        ArtifactError: the file system refuses.
    """
    directory = base / PROGRESS_DIRECTORY
    named = {base / name for name in kept} | {directory}
    with os_errors(base, "cannot be cleared"):
        for entry in base.iterdir():
            if entry not in named:
                remove(entry)
        for entry in directory.iterdir():
            if entry.name not in (_RECORD, INPUT_DIRECTORY) and entry.name not in progress.files.values():
                remove(entry)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first few inputs in which two runs differ, for a message; empty where they agree."""
    old, new = _flat(before), _flat(now)
    changed = [k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)]
    shown = [f"{k} was {_short(old.get(k))} and is {_short(new.get(k))}" for k in changed[:_MOST_SHOWN]]
    rest = [f"{len(changed) - _MOST_SHOWN} more"] if len(changed) > _MOST_SHOWN else []
    return "; ".join(shown + rest)


def remove(entry: Path) -> None:
    """Remove a file, a link, or a directory with all it holds."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def _write_tensors(path: Path, parts: Iterable[Tensor]) -> str:
    """Write tensors to a file; returns its SHA-256."""
    digest = hashlib.sha256()
    with os_errors(path, "cannot be written"), path.open("wb") as file:
        for part in parts:
            data = part.contiguous().view(-1).view(torch.uint8).numpy().data
            digest.update(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _digest(data: Any) -> str:
    """SHA-256 of JSON data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"
