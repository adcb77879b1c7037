"""Compiles a program of this folder that includes csrc's host headers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from repository import REPOSITORY

FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror", f"-I{REPOSITORY / 'csrc'}"]


def compile_program(source: str, folder: Path) -> Path:
    """The program, built into a folder; skips the test where there is no C++ compiler."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: neither CXX, g++ nor clang++")
    program = folder / Path(source).stem
    subprocess.run([compiler, *FLAGS, str(REPOSITORY / "tests" / source), "-o", str(program)], check=True)
    return program
