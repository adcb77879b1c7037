"""The kernels, compiled for the host once for all tests of this folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from emulation.library import build
from fut_runtime.cuda.library import Library


@pytest.fixture(scope="session")
def emulated(run_dir: Path) -> Library:
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
    return Library(library)
