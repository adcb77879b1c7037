"""Builds `fut_runtime/cuda/_fut.so` from every .cu file under csrc: `python -m csrc.build`, and from setup.py.

Objects are kept under a hash of everything that goes into them, so a second build compiles only what has changed,
wherever it happens: FUT_CUDA_CACHE names the directory (default `build/cuda` beside csrc). MAX_JOBS bounds how many
files are compiled at once.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from csrc.nvcc import COMPILE_FLAGS, LINK_FLAGS, BuildError, Nvcc, find_nvcc
from csrc.ptxas import KernelUsage, faults, kernel_usage

ROOT = Path(__file__).resolve().parent.parent
#: Where the library lies in the package.
LIBRARY = Path("fut_runtime") / "cuda" / "_fut.so"

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_DECLARED = re.compile(r"^FUT_API\s[^;(]*?\b(fut_\w+)\s*\(", re.MULTILINE)


@dataclass(frozen=True)
class Compiled:
    """An object file and what ptxas said about the kernels in it."""

    path: Path
    kernels: list[KernelUsage]


def kernel_sources(folder: Path) -> list[Path]:
    """Every .cu file under a folder, sorted."""
    return sorted(folder.rglob("*.cu"))


def build_library(
    output: Path,
    nvcc: Nvcc,
    *,
    sources: Path = ROOT / "csrc",
    cache: Path | None = None,
    jobs: int | None = None,
    report: Callable[[str], None] = print,
) -> list[KernelUsage]:
    """Compile and link the library.

    Args:
        output: file to write; it appears whole or not at all.
        nvcc: the compiler.
        sources: folder of .cu files, with `fut.h` in it.
        cache: directory of objects.
        jobs: files to compile at once.
        report: gets a line a file.

    Returns:
        Resources of every kernel.

    Raises:
        BuildError: a file does not compile, spills or draws a warning that must not be; or the functions that the
            library offers are not those of fut.h.
    """
    files = kernel_sources(sources)
    if not files:
        raise BuildError(f"{sources} has no .cu file")
    cache = cache or Path(os.environ.get("FUT_CUDA_CACHE") or ROOT / "build" / "cuda")
    cache.mkdir(parents=True, exist_ok=True)
    jobs = jobs or int(os.environ.get("MAX_JOBS") or 0) or len(os.sched_getaffinity(0))
    version = nvcc.version()
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        tasks = [pool.submit(_compile, file, sources, nvcc, version, cache, report) for file in files]
    # Whoever changed several files wants to hear of all that is wrong with them.
    failures = [str(error) for task in tasks if isinstance(error := task.exception(), BuildError)]
    if failures:
        raise BuildError("\n".join(failures))
    compiled = [task.result() for task in tasks]
    _link(output, [c.path for c in compiled], nvcc, sources / "fut.h")
    report(f"{output}: {output.stat().st_size / 1e6:.1f} MB")
    return [kernel for c in compiled for kernel in c.kernels]


def included_files(source: Path, root: Path) -> list[Path]:
    """A source and every file that it includes by a quoted name, directly or not, sorted."""
    found = {source}
    open_files = [source]
    while open_files:
        file = open_files.pop()
        for name in _INCLUDE.findall(file.read_bytes()):
            for folder in (file.parent, root):
                path = Path(os.path.normpath(folder / name.decode()))
                if path.is_file():
                    if path not in found:
                        found.add(path)
                        open_files.append(path)
                    break
    return sorted(found)


def declared_functions(header: Path) -> set[str]:
    """Names of the functions that a header declares with FUT_API."""
    return set(_DECLARED.findall(header.read_text(encoding="utf-8")))


def _compile(
    source: Path, root: Path, nvcc: Nvcc, version: str, cache: Path, report: Callable[[str], None]
) -> Compiled:
    name = source.relative_to(root)
    digest = hashlib.sha256("\0".join((version, *COMPILE_FLAGS)).encode())
    for file in included_files(source, root):
        content = file.read_bytes()
        digest.update(f"\0{os.path.relpath(file, root)}\0{len(content)}\0".encode() + content)
    stem = "_".join(name.with_suffix("").parts)
    target = cache / f"{stem}-{digest.hexdigest()[:32]}.o"
    log_file = target.with_suffix(".log")
    if not (target.is_file() and log_file.is_file()):
        begin = time.perf_counter()
        # From inside the folder and by relative names: -lineinfo writes them into the object.
        command = [str(nvcc.program), *COMPILE_FLAGS, "-I.", "-c", str(name), "-o"]
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            fresh = Path(scratch) / target.name
            log = _run([*command, str(fresh)], root, f"csrc/{name}")
            if found := faults(log):
                raise BuildError(f"csrc/{name}: " + "; ".join(found))
            log_file.write_text(log, encoding="utf-8")
            fresh.replace(target)
        report(f"csrc/{name}: compiled in {time.perf_counter() - begin:.0f} s")
        for old in cache.glob(f"{stem}-{'?' * 32}.*"):
            if old.stem != target.stem:
                old.unlink(missing_ok=True)
    return Compiled(target, kernel_usage(log_file.read_text(encoding="utf-8")))


def _link(output: Path, objects: Sequence[Path], nvcc: Nvcc, header: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        fresh = Path(scratch) / output.name
        folders = [f"-L{folder}" for folder in nvcc.library_dirs]
        _run([str(nvcc.program), *LINK_FLAGS, *folders, *map(str, objects), "-o", str(fresh)], ROOT, output.name)
        _check_functions(fresh, header)
        fresh.replace(output)


def _check_functions(library: Path, header: Path) -> None:
    """The library offers exactly the functions of fut.h."""
    listing = _run(["nm", "-D", "--defined-only", "-P", str(library)], ROOT, library.name)
    offered = {line.split()[0] for line in listing.splitlines() if line.split()[1] in "TtWwVv"}
    declared = declared_functions(header)
    if missing := sorted(declared - offered):
        raise BuildError(f"{header.name} declares {', '.join(missing)}, which no file under csrc defines")
    if extra := sorted(offered - declared):
        raise BuildError(f"{library.name} exports {', '.join(extra)}, which {header.name} does not declare")


def _run(command: Sequence[str], folder: Path, what: str) -> str:
    """Output of a command, both streams; BuildError with that output where it fails."""
    try:
        done = subprocess.run(
            command,
            check=False,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise BuildError(f"{what}: {command[0]} does not run ({error.strerror})") from error
    if done.returncode:
        raise BuildError(f"{what}: {Path(command[0]).name} failed with exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def main() -> int:
    """Build the library in place; exit code 1 where that fails, 3 where there is no compiler."""
    parser = argparse.ArgumentParser(prog="python -m csrc.build", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say which compiler would be used")
    arguments = parser.parse_args()
    try:
        nvcc = find_nvcc()
        if nvcc is None:
            print("no nvcc: not under CUDA_HOME, on the path, in /usr/local/cuda, or from nvidia-cuda-nvcc")
            return 3
        if arguments.check:
            print(f"{nvcc.program}\n{nvcc.version().strip()}")
            return 0
        if not kernel_sources(ROOT / "csrc"):
            print("csrc has no .cu file: there is nothing to build")
            return 0
        kernels = build_library(ROOT / LIBRARY, nvcc)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(kernels)} kernels, none of them spills registers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
