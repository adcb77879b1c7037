"""The kernels, compiled for the host once for all tests of this folder."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
from filelock import FileLock
from torch import Tensor

import gemm_matrices
from emulation.library import build
from fut_runtime.cuda.library import Library

#: Puts a module of `fut_runtime.cuda`, whose calls go to one function, into the emulation.
OnTheHost = Callable[[ModuleType, str], AbstractContextManager[None]]


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


@pytest.fixture
def on_the_host(emulated: Library, monkeypatch: pytest.MonkeyPatch) -> OnTheHost:
    """Calls of a module run in the emulation, on tensors of the CPU."""

    @contextmanager
    def emulate(module: ModuleType, function: str) -> Iterator[None]:
        def run(call: ctypes.Structure, *_: Tensor) -> None:
            emulated.call(function, ctypes.byref(call), None)

        def check(
            tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], name: str, *, dense: bool = False
        ) -> None:
            assert tensor.dtype == dtype and tuple(tensor.shape) == shape, name

        monkeypatch.setattr(module, "_run", run)
        monkeypatch.setattr(module, "check_matrix", check)
        with gemm_matrices.emulated():
            yield

    return emulate
