"""Looks into the built library: what each kernel uses and which instructions it holds (`python -m csrc.disassembly`).

A kernel that compiles may still have lost what makes it fast: tensor core instructions turned into scalar ones, bulk
copies into loads, an array moved from registers into local memory. The machine code tells.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from csrc.build import LIBRARY, ROOT

_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<name>[A-Z][A-Z0-9_]*)")
_USAGE = re.compile(r"^\s*Function (?P<name>\S+):$")
_RESOURCES = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+)")

#: The tensor cores, by warp and by warpgroup (QGMMA: E4M3); copies into shared memory, of bytes and of tiles.
TENSOR_CORES = ("HMMA", "HGMMA", "QGMMA")
COPIES = ("UBLKCP", "UTMALDG")
#: Part of a kernel's name -> instructions it must hold.
EXPECTED: dict[str, tuple[str, ...]] = {
    "project": ("HMMA", "UBLKCP"),
    "attend": ("HMMA", "UBLKCP"),
    "gemm<fut::E4m3": ("QGMMA", "UTMALDG", "USETMAXREG"),
    "gemm<fut::Bf16": ("HGMMA", "UTMALDG", "USETMAXREG"),
    "w8a16<": ("HGMMA", "UTMALDG", "USETMAXREG"),
    "prefill_attention<": ("HGMMA", "UTMALDG", "USETMAXREG"),
}
#: Local memory: registers that were spilled, or an array with an index that is not known at compile time.
FORBIDDEN = ("LDL", "STL")


class ToolsMissingError(Exception):
    """cuobjdump or nvdisasm is not here."""


@dataclass
class Kernel:
    """Machine code of a kernel: its name without argument types, resources, and instructions by name."""

    name: str
    registers: int = 0
    shared_bytes: int = 0
    stack_bytes: int = 0
    instructions: Counter[str] = field(default_factory=Counter)


def read_kernels(library: Path) -> list[Kernel]:
    """Disassemble every kernel of a library, in the order of their names.

    Raises:
        ToolsMissingError: install nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm.
    """
    tools = _tools()
    code = _output([tools["cuobjdump"], "-sass", str(library)])
    usage = _output([tools["cuobjdump"], "-res-usage", str(library)])
    kernels = parse(code, usage)
    names = _output(["c++filt", "-p"], "\n".join(kernels)).splitlines()
    for kernel, name in zip(kernels.values(), names, strict=True):
        kernel.name = name
    return sorted(kernels.values(), key=lambda kernel: kernel.name)


def parse(code: str, usage: str) -> dict[str, Kernel]:
    """Kernels by mangled name, from the output of `cuobjdump -sass` and `cuobjdump -res-usage`."""
    kernels: dict[str, Kernel] = {}
    current: Kernel | None = None
    for line in code.splitlines():
        if match := _FUNCTION.match(line):
            current = kernels.setdefault(match[1], Kernel(match[1]))
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.instructions[match["name"]] += 1
    current = None
    for line in usage.splitlines():
        if match := _USAGE.match(line):
            current = kernels.get(match["name"])
        elif current is not None and (match := _RESOURCES.search(line)):
            current.registers, current.stack_bytes = int(match["registers"]), int(match["stack"])
            current.shared_bytes = int(match["shared"])
    return kernels


def problems(kernels: list[Kernel]) -> list[str]:
    """What is wrong with the kernels, a line each."""
    found = []
    for kernel in kernels:
        found += [f"{kernel.name}: holds {n} {name}" for name in FORBIDDEN if (n := kernel.instructions[name])]
        for part, names in EXPECTED.items():
            if part in kernel.name:
                found += [f"{kernel.name}: holds no {name}" for name in names if not kernel.instructions[name]]
    return found


def _tools() -> dict[str, str]:
    """Paths of both programs; nvdisasm is found by cuobjdump on the path that `_output` gives it."""
    found = {name: shutil.which(name, path=_path()) for name in ("cuobjdump", "nvdisasm")}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise ToolsMissingError(
            f"no {' and no '.join(missing)}: install nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm (extra dev)"
        )
    return {name: path for name, path in found.items() if path is not None}


def _path() -> str:
    folders = [str(Path(entry) / "nvidia" / "cu13" / "bin") for entry in sys.path if entry]
    return os.pathsep.join([os.environ.get("PATH", ""), *folders, "/usr/local/cuda/bin"])


def _output(command: list[str], text: str = "") -> str:
    environment = {**os.environ, "PATH": _path()}
    done = subprocess.run(command, input=text, env=environment, check=True, capture_output=True, text=True)
    return done.stdout


def main() -> int:
    """Print a line a kernel; exit code 1 where one is not as it should be, 3 where it cannot be told."""
    library = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / LIBRARY
    try:
        kernels = read_kernels(library)
    except ToolsMissingError as error:
        print(error)
        return 3
    except subprocess.CalledProcessError as error:
        print(f"{library}: {Path(error.cmd[0]).name} failed: {error.stderr.strip()}", file=sys.stderr)
        return 1
    print(f"{'registers':>9} {'static smem':>11} {'tensor':>6} {'copies':>6} {'total':>6}  kernel")
    for kernel in kernels:
        counts = kernel.instructions
        tensor, copies = (sum(counts[name] for name in names) for names in (TENSOR_CORES, COPIES))
        columns = f"{kernel.registers:>9} {kernel.shared_bytes:>11} {tensor:>6} {copies:>6}"
        print(f"{columns} {counts.total():>6}  {kernel.name}")
    found = problems(kernels)
    for line in found:
        print(f"error: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
