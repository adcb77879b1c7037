"""A conversion in a process of its own that is killed at a chosen write: no clean-up runs, and nothing is flushed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

#: Everything a conversion does to the file system goes through these.
_CALLS = ("pwrite", "fsync", "fdatasync", "replace", "rename", "unlink", "mkdir", "rmdir", "open", "ftruncate")


def convert_and_kill(
    checkpoint: Path | str,
    out: Path,
    overrides: Mapping[str, Any],
    at: int | None,
    *,
    prepare: Callable[[], None] | None = None,
    **options: Any,
) -> int | None:
    """Convert, with every layer saved, and kill the process at the `at`-th call to the file system.

    A write that is the last is cut in half. Returns the number of calls of a conversion that ended, None where it was
    killed. `prepare` is called in the process first; `options` are `convert`'s.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fut_convert.pipeline"])
    assert isinstance(context, ForkServerContext)
    receiver, sender = context.Pipe(duplex=False)
    arguments = (str(checkpoint), str(out), dict(overrides), at, sender, prepare, options)
    process = context.Process(target=_convert, args=arguments)
    process.start()
    sender.close()
    process.join()
    if process.exitcode == -signal.SIGKILL:
        return None
    assert process.exitcode == 0
    count: int = receiver.recv()
    return count


def _convert(
    checkpoint: str, out: str, overrides: dict[str, Any], at: int | None, sender: Any,
    prepare: Callable[[], None] | None, options: dict[str, Any],
) -> None:  # fmt: skip
    if prepare is not None:
        prepare()
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
    convert(checkpoint, out, overrides=overrides, **options)
    sender.send(made[0])
