"""How the CUDA library is built: finding nvcc, what goes stale, what fails a build, and what lands in a wheel."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from csrc.build import build_library, declared_functions, included_files
from csrc.nvcc import BuildError, Nvcc, find_nvcc
from csrc.ptxas import KernelUsage, faults, kernel_usage
from repository import REPOSITORY

HEADER = """
#define FUT_API __attribute__((visibility("default")))
extern "C" {
FUT_API int fut_answer(void);
FUT_API const char*
    fut_name(int which);
}
"""
KERNEL = """
#include <vector>
#include "fut.h"
#include "constants/answer.cuh"
__global__ void store(int* out) { *out = kAnswer; }
int fut_answer(void) {
  std::vector<int> answers(3, kAnswer);
  store<<<1, 1>>>(nullptr);
  return answers.at(1);
}
"""
NAME = '#include "../fut.h"\nconst char* fut_name(int which) { return which ? "one" : "zero"; }\n'
#: A kernel that needs more registers than it may have.
SPILLING = """
__global__ void __launch_bounds__(1024, 2) spill(float* x) {
  float value[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) value[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = value[63 - i] * value[(i * 7) & 63];
}
"""
LOG = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4goodPf' for 'sm_90a'
ptxas info    : Function properties for _Z4goodPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 16384 bytes smem
ptxas info    : Compiling entry function '_Z3badPf' for 'sm_90a'
ptxas info    : Function properties for _Z3badPf
    48 bytes stack frame, 20 bytes spill stores, 28 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "csrc"
    write(folder / "fut.h", HEADER)
    write(folder / "answer.cu", KERNEL)
    write(folder / "constants" / "answer.cuh", '#include "base.cuh"\nconstexpr int kAnswer = kBase + 2;\n')
    write(folder / "constants" / "base.cuh", "constexpr int kBase = 40;\n")
    write(folder / "host" / "name.cu", NAME)
    return folder


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def build(sources: Path, nvcc: Nvcc) -> tuple[Path, list[str]]:
    """The library, and the sources that were compiled for it."""
    lines: list[str] = []
    library = sources.parent / "out" / "_fut.so"
    build_library(library, nvcc, sources=sources, cache=sources.parent / "cache", report=lines.append)
    return library, [line.split(":")[0] for line in lines if "compiled" in line]


def test_builds_what_the_header_declares_and_only_what_has_changed(sources: Path, nvcc: Nvcc) -> None:
    library, compiled = build(sources, nvcc)
    assert sorted(compiled) == ["csrc/answer.cu", "csrc/host/name.cu"]
    assert ctypes.CDLL(str(library)).fut_answer() == 42

    assert build(sources, nvcc)[1] == []

    write(sources / "constants" / "base.cuh", "constexpr int kBase = 50;\n")
    library, compiled = build(sources, nvcc)
    assert compiled == ["csrc/answer.cu"]
    # Another name: the dynamic loader keeps a library that it has loaded once.
    moved = library.rename(library.with_name("_again.so"))
    assert ctypes.CDLL(str(moved)).fut_answer() == 52

    listing = subprocess.run(["nm", "-D", "--defined-only", moved], check=True, capture_output=True, text=True).stdout
    assert [line.split()[-1] for line in listing.splitlines()] == ["fut_answer", "fut_name"]


def test_a_declared_function_must_be_defined(sources: Path, nvcc: Nvcc) -> None:
    (sources / "host" / "name.cu").unlink()
    with pytest.raises(BuildError, match=r"fut\.h declares fut_name, which no file"):
        build(sources, nvcc)
    assert not (sources.parent / "out" / "_fut.so").exists()


def test_a_compile_error_names_the_file_and_the_line(sources: Path, nvcc: Nvcc) -> None:
    write(sources / "host" / "name.cu", NAME + "int broken(void) { return undeclared; }\n")
    with pytest.raises(BuildError, match=r"(?s)csrc/host/name\.cu: nvcc failed.*name\.cu\(3\).*undeclared"):
        build(sources, nvcc)


def test_spilled_registers_fail_the_build(sources: Path, nvcc: Nvcc) -> None:
    write(sources / "spill.cu", SPILLING)
    with pytest.raises(BuildError, match=r"csrc/spill\.cu: \S*spill\S* spills \d+ bytes of registers"):
        build(sources, nvcc)


def test_reads_resources_and_spills_of_kernels() -> None:
    assert kernel_usage(LOG) == [
        KernelUsage("_Z4goodPf", registers=168, shared_bytes=16384),
        KernelUsage("_Z3badPf", registers=32, stack_bytes=48, spill_bytes=48),
    ]
    assert faults(LOG) == ["_Z3badPf spills 48 bytes of registers"]


@pytest.mark.parametrize("number", [7508, 7510, 7511, 7512, 7513, 7514, 7515])
def test_warnings_that_cost_speed_are_faults(number: int) -> None:
    line = f"ptxas info    : (C{number}) Potential Performance Loss: instructions are serialized in function 'f'"
    assert faults(line) == [line]


@pytest.mark.parametrize("number", [7507, 7509, 7516, 17510, 75101])
def test_other_warnings_are_not(number: int) -> None:
    assert faults(f"ptxas info    : (C{number}) whatever") == []


def test_included_files_are_found_beside_the_file_and_from_the_root(sources: Path) -> None:
    write(sources / "host" / "deep.cu", '  # include "constants/answer.cuh"\n#include "missing.h"\n#include <vector>\n')
    names = [p.relative_to(sources).as_posix() for p in included_files(sources / "host" / "deep.cu", sources)]
    assert names == ["constants/answer.cuh", "constants/base.cuh", "host/deep.cu"]


def test_header_declares_what_the_text_says() -> None:
    declared = declared_functions(REPOSITORY / "csrc" / "fut.h")
    assert {"fut_last_error", "fut_abi_version", "fut_decoder_create", "fut_decoder_logits", "fut_sample"} <= declared


def test_cuda_home_wins_and_must_be_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(BuildError, match=r"has no bin/nvcc"):
        find_nvcc()
    write(tmp_path / "bin" / "nvcc", "")
    assert find_nvcc() == Nvcc(tmp_path / "bin" / "nvcc")
    write(tmp_path / "lib" / "libcudart_static.a", "")
    assert find_nvcc() == Nvcc(tmp_path / "bin" / "nvcc", (tmp_path / "lib",))


def test_finds_the_compiler_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("csrc.nvcc._system", list)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path)])
    assert find_nvcc() is None
    write(tmp_path / "nvidia" / "cu13" / "bin" / "nvcc", "")
    found = find_nvcc()
    assert found is not None and found.program == tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"


@pytest.fixture
def tree(tmp_path: Path, sources: Path) -> Path:
    """A copy of the project with small kernels in place of its own."""
    folder = tmp_path / "project"
    kept = ("fut_runtime", "fut_convert", "recipes", "setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE")
    for name in kept:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            write(folder / name, source.read_text(encoding="utf-8"))
    shutil.copytree(sources, folder / "csrc")
    for file in (*(REPOSITORY / "csrc").glob("*.py"), REPOSITORY / "csrc" / "exports.map"):
        shutil.copy(file, folder / "csrc")
    return folder


def make_wheel(tree: Path, **variables: str) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w"]
    environment = {**os.environ, "FUT_CUDA_CACHE": str(tree / "cache"), "FUT_SKIP_CUDA": "", **variables}
    out = tree / "wheels"
    shutil.rmtree(out, ignore_errors=True)
    subprocess.run(
        [*command, str(out), str(tree)], env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.mark.usefixtures("nvcc")
def test_a_wheel_with_a_library_is_for_this_platform_and_any_python(tree: Path) -> None:
    wheel = make_wheel(tree)
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        assert archive.getinfo("fut_runtime/cuda/_fut.so").file_size > 10_000
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        assert b"Root-Is-Purelib: false" in archive.read(metadata)
    # What the first build left behind must not slip into a wheel without a library.
    pure = make_wheel(tree, FUT_SKIP_CUDA="1")
    assert "-py3-none-any" in pure.name
    with zipfile.ZipFile(pure) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]


@pytest.mark.usefixtures("nvcc")
def test_a_compile_error_fails_the_install(tree: Path) -> None:
    write(tree / "csrc" / "host" / "name.cu", "this is no C++\n")
    with pytest.raises(subprocess.CalledProcessError) as error:
        make_wheel(tree)
    assert b"csrc/host/name.cu: nvcc failed" in error.value.stdout
