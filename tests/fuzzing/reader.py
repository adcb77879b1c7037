"""What a reader under test is: valid files, damage to them, and the call that reads them."""

from __future__ import annotations

import json
import shutil
import struct
from abc import ABC, abstractmethod
from pathlib import Path
from random import Random
from typing import ClassVar

from fut_runtime.errors import FutError
from fuzzing.limits import MEMORY_BYTES
from fuzzing.mutations import damage_bytes, damage_json

Files = dict[str, bytes]

#: What a reader may raise.
OWN_ERRORS = FutError


class Reader(ABC):
    """A reader under test.

    Attributes:
        name: what it is called on the command line.
        memory_bytes: address space that reading may take.
        whole: valid files, by name.
    """

    name: ClassVar[str]
    memory_bytes: ClassVar[int] = MEMORY_BYTES

    def __init__(self, folder: Path) -> None:
        """Make the valid files in an empty folder of its own."""
        self.folder = folder
        self.whole = self.make(folder / "whole")

    @abstractmethod
    def make(self, folder: Path) -> Files:
        """The valid files; `folder` does not exist yet."""

    @abstractmethod
    def damaged(self, random: Random) -> Files:
        """The files with something wrong."""

    @abstractmethod
    def read(self, folder: Path) -> None:
        """Read the files in a folder as far as the programs do.

        Raises:
            FutError: what is wrong with them.
        """

    def write(self, files: Files) -> Path:
        """Put files in place for `read`."""
        place = self.folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        return self.write_into(place, files)

    @staticmethod
    def write_into(place: Path, files: Files) -> Path:
        """Write files into a folder."""
        for name, content in files.items():
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return place

    def close(self) -> None:
        """Stop what `make` started."""
        return None


def files_of(folder: Path) -> Files:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def damage_document(random: Random, text: bytes) -> bytes:
    """A JSON file, damaged in what it says, or now and then in its bytes."""
    if random.random() < 0.15:
        return damage_bytes(random, text)
    return damage_json(random, json.loads(text)).encode("utf-8", "surrogatepass")


def damage_shard(random: Random, data: bytes) -> bytes:
    """A safetensors file whose header says something else, of its own length or another, or with damaged bytes."""
    length = struct.unpack("<Q", data[:8])[0]
    if random.random() < 0.25:
        return damage_bytes(random, data, header=8 + length)
    text = damage_json(random, json.loads(data[8 : 8 + length])).encode("utf-8", "surrogatepass")
    if random.random() < 0.5:
        text = text.ljust(length)
    return struct.pack("<Q", len(text)) + text + data[8 + length :]
