"""Compiles the kernels of csrc for the host, with the emulation of this folder: a library with the same functions."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from repository import REPOSITORY

HERE = Path(__file__).resolve().parent
#: Everything of a step but the choice of tokens.
SOURCES = (
    "decode/projection.cu", "decode/attention.cu", "decode/embed.cu",
    "host/decoder.cu", "host/project.cu", "host/sample.cu", "host/error.cu", "host/gemm.cu", "prefill/tensor_map.cu",
    "prefill/gemm_store_bf16.cu", "prefill/gemm_store_f32.cu", "prefill/gemm_residual.cu", "prefill/gemm_swiglu.cu",
    "prefill/gemm_qkv.cu", "prefill/gemm_swiglu_bf16.cu", "prefill/cache_copy.cu", "prefill/prompt_rows.cu",
    "prefill/w8a16.cu", "prefill/attention.cu", "host/prefill_attention.cu", "host/prefill.cu",
)  # fmt: skip
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w", "-x", "c++")

_SHARED = re.compile(r"extern __shared__ __align__\(\d+\) uint8_t (\w+)\[\];")
_LAUNCH = re.compile(r"(\w+)<<<(.*?)>>>\(", re.DOTALL)


def translate(tree: Path) -> None:
    """Turn a copy of csrc into C++: the emulation's PTX, and what only nvcc understands in other words."""
    shutil.rmtree(tree / "ptx")
    shutil.copytree(HERE / "ptx", tree / "ptx")
    for path in (path for folder in ("decode", "host", "prefill") for path in (tree / folder).iterdir()):
        text = path.read_text(encoding="utf-8")
        text = _SHARED.sub(r"uint8_t* const \1 = emulation::shared_memory();", text)
        text = _LAUNCH.sub(r"emulated_call(\1, \2, ", text)
        if "asm" in re.findall(r"\w+", text):
            raise AssertionError(f"{path.name} holds assembly: move it to csrc/ptx and give the emulation its twin")
        path.write_text(text, encoding="utf-8")


def build(directory: Path, compiler: str) -> Path:
    """Build into a new directory; returns the library."""
    tree = directory / "csrc"
    shutil.copytree(REPOSITORY / "csrc", tree, ignore=shutil.ignore_patterns("__pycache__"))
    translate(tree)
    sources = [*(tree / name for name in SOURCES), HERE / "emulation.cpp", HERE / "not_emulated.cpp"]

    def compile_one(source: Path) -> Path:
        target = directory / f"{source.parent.name}_{source.stem}.o"
        includes = ("-I", str(HERE / "include"), "-I", str(tree))
        command = [compiler, *FLAGS, *includes, "-c", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise AssertionError(f"{source.name} does not compile for the host:\n{done.stderr[:4000]}")
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    library = directory / "libemulated.so"
    subprocess.run([compiler, "-shared", *map(str, objects), "-o", str(library)], check=True)
    return library
