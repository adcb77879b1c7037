"""Finds nvcc, and says with which options the kernels are compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

#: Hopper only: sm_90a has the instructions that later cards lack or name otherwise.
ARCHITECTURE = "-gencode=arch=compute_90a,code=sm_90a"
COMPILE_FLAGS = (
    "-O3",
    "-std=c++17",
    ARCHITECTURE,
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-lineinfo",
    "-Xptxas=-v",
)
#: The CUDA runtime goes into the library and stays invisible outside: PyTorch brings one of its own, of any version.
LINK_FLAGS = (
    ARCHITECTURE,
    "-shared",
    "-cudart=static",
    f"-Xlinker=--version-script={Path(__file__).with_name('exports.map')}",
    "-Xlinker=-z,defs",
)


class BuildError(Exception):
    """The library cannot be built; the message says why, and what to do."""


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler: its program, and directories of libraries that it does not find by itself."""

    program: Path
    library_dirs: tuple[Path, ...] = ()

    def version(self) -> str:
        """What `nvcc --version` prints: two compilers that print the same make the same code.

        Raises:
            BuildError: it does not run.
        """
        try:
            return subprocess.run([self.program, "--version"], check=True, capture_output=True, text=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            raise BuildError(f"{self.program} does not run ({error}): set CUDA_HOME to a working toolkit") from error


def find_nvcc() -> Nvcc | None:
    """The CUDA compiler to use: that of CUDA_HOME, of the path, of the system, or of the package nvidia-cuda-nvcc.

    Raises:
        BuildError: CUDA_HOME is set but has no nvcc. Another compiler than the one asked for would be a surprise.
    """
    home = os.environ.get("CUDA_HOME")
    if home:
        program = Path(home) / "bin" / "nvcc"
        if not program.is_file():
            raise BuildError(f"CUDA_HOME is {home}, which has no bin/nvcc: correct it, or unset it")
        return _at(program)
    on_path = shutil.which("nvcc")
    if on_path:
        return _at(Path(on_path))
    return next((_at(program) for program in (*_system(), *_packages()) if program.is_file()), None)


def _at(program: Path) -> Nvcc:
    """An nvcc whose toolkit has its libraries in `lib`, as the packages on PyPI have, needs to be told."""
    libraries = program.parent.parent / "lib"
    return Nvcc(program, (libraries,) if (libraries / "libcudart_static.a").is_file() else ())


def _system() -> list[Path]:
    return [Path("/usr/local/cuda/bin/nvcc")]


def _packages() -> list[Path]:
    """Where nvidia-cuda-nvcc 13 puts it: nvidia/cu13/bin in any directory of packages that Python sees."""
    return [Path(entry) / "nvidia" / "cu13" / "bin" / "nvcc" for entry in sys.path if entry]
