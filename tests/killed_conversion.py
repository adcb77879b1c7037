"""A conversion in a process of its own that is killed at a chosen write: no clean-up runs, and nothing is flushed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

#: Everything a conversion does to the file system goes through these.
_CALLS = ("pwrite", "fsync", "fdatasync", "replace", "rename", "unlink", "mkdir", "rmdir", "open", "ftruncate")


def convert_and_kill(checkpoint: Path, out: Path, overrides: Mapping[str, Any], at: int | None) -> int | None:
    """Convert, with every layer saved, and kill the process at the `at`-th call to the file system.

    A write that is the last is cut in half. Returns the number of calls of a conversion that ended, None where it was
    killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fut_convert.pipeline"])
    assert isinstance(context, ForkServerContext)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_convert, args=(str(checkpoint), str(out), dict(overrides), at, sender))
    process.start()
    sender.close()
    process.join()
    if process.exitcode == -signal.SIGKILL:
        return None
    assert process.exitcode == 0
    count: int = receiver.recv()
    return count


def _convert(checkpoint: str, out: str, overrides: dict[str, Any], at: int | None, sender: Any) -> None:
    import torch

    from fut_convert import convert, resume

    torch.set_num_threads(1)
    resume._SAVING_SHARE = 1e9
    made = [0]

    def counting(name: str) -> None:
        original = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            # Reading is not counted: a kill there is a kill before the write that follows.
            if name == "open" and not kwargs.get("flags", args[1] if len(args) > 1 else 0) & os.O_CREAT:
                return original(*args, **kwargs)
            made[0] += 1
            if made[0] == at:
                if name == "pwrite":
                    original(args[0], args[1][: len(args[1]) // 2], args[2])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(os, name, call)

    for name in _CALLS:
        counting(name)
    convert(checkpoint, out, overrides=overrides)
    sender.send(made[0])
