"""The kernels, compiled for the host once for all tests of this folder."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from emulation.library import build
from fut_runtime.cuda.structs import PLAIN_FUNCTIONS, STATUS_FUNCTIONS, Status


class EmulatedLibrary:
    """The functions of csrc/fut.h that are emulated, by their names."""

    def __init__(self, path: Path) -> None:
        self._functions = ctypes.CDLL(str(path))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._functions, name)
        if name in STATUS_FUNCTIONS:
            function.restype, function.argtypes = ctypes.c_int, STATUS_FUNCTIONS[name]
        else:
            function.restype, function.argtypes = PLAIN_FUNCTIONS[name]
        return function

    def call(self, name: str, *arguments: object) -> None:
        """Run a function that returns a status, which must be OK."""
        status = getattr(self, name)(*arguments)
        assert status == Status.OK, self.fut_last_error().decode()


@pytest.fixture(scope="session")
def emulated(run_dir: Path) -> EmulatedLibrary:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to compile the kernels for the host")
    directory = run_dir / "emulation"
    with FileLock(str(directory) + ".lock"):
        library = directory / "libemulated.so"
        if not library.exists():
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            build(directory, compiler)
    return EmulatedLibrary(library)
