"""Standard streams that the programs can rely on, whatever they were started with."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


def prepare_streams() -> None:
    """Make sure that printing cannot fail for want of a stream or of a character.

    A stream that was closed before the start (`>&-`) becomes the null device, and takes the descriptor that a file of
    ours would otherwise get. What an encoding other than UTF-8 lacks, and names of files that are no UTF-8, are shown
    as escapes.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # for the whole program
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def for_terminal(text: str) -> str:
    """A message that may quote files: what would move a terminal's cursor or hide something is shown as escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def is_utf8(stream: TextIO) -> bool:
    """Whether a stream can take every character."""
    return (stream.encoding or "utf-8").lower().replace("_", "-") in ("utf-8", "utf8")
