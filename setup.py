"""Says which folders go into the wheel, and builds the CUDA library; everything else stands in pyproject.toml.

`recipes/` lies beside the packages because people read and copy it. In the wheel it is `fut_convert/recipes`.

The library is built where there is an nvcc (see `csrc/nvcc.py`), and the wheel is then one of this platform; elsewhere
the package installs with the reference backend alone, and `fut-run info` says so. FUT_SKIP_CUDA=1 leaves the library
out in any case. With `pip install -e` it is built in place.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# A build frontend runs this file with a path of its own.
sys.path.insert(0, str(ROOT))

from csrc.build import LIBRARY, build_library, kernel_sources  # noqa: E402
from csrc.nvcc import Nvcc, find_nvcc  # noqa: E402


def compiler() -> Nvcc | None:
    """The compiler to build the library with, or None where the wheel goes without one."""
    if os.environ.get("FUT_SKIP_CUDA", "0") not in ("", "0") or not kernel_sources(ROOT / "csrc"):
        return None
    return find_nvcc()


class BuildWithLibrary(build_py):
    """Copies the modules, then builds the library beside them."""

    def run(self) -> None:
        super().run()
        nvcc = compiler()
        if self.editable_mode:
            if nvcc is not None:
                build_library(ROOT / LIBRARY, nvcc)
            return
        target = Path(self.build_lib).resolve() / LIBRARY
        target.unlink(missing_ok=True)  # one that an earlier build left
        if nvcc is not None:
            build_library(target, nvcc)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs: list[str] = super().get_outputs(include_bytecode)
        return [*outputs, str(Path(self.build_lib) / LIBRARY)] if compiler() else outputs


class PlatformWheel(bdist_wheel):
    """A wheel with a library is for this platform, and for any Python: ctypes loads it."""

    def get_tag(self) -> tuple[str, str, str]:
        tag: tuple[str, str, str] = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


class Project(Distribution):
    """Tells setuptools that a package with the library depends on the platform, though it has no extension module."""

    def has_ext_modules(self) -> bool:
        return compiler() is not None


setup(
    packages=[
        *find_packages(include=["fut_convert", "fut_convert.*", "fut_runtime", "fut_runtime.*"]),
        "fut_convert.data",
        "fut_convert.recipes",
    ],
    package_dir={"fut_convert.recipes": "recipes"},
    package_data={
        "fut_convert": ["py.typed"],
        "fut_convert.data": ["*.md", "*.txt"],
        "fut_convert.recipes": ["*.yaml"],
        "fut_runtime": ["py.typed"],
    },
    distclass=Project,
    cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel},
)
