"""What ptxas says about each kernel: registers and shared memory, spills, and warnings that cost speed."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)'")
_SPILLS = re.compile(r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes")
_REGISTERS = re.compile(r"Used (?P<count>\d+) registers")
_SHARED = re.compile(r"(?P<bytes>\d+) bytes smem")
#: C7508: setmaxnreg ignored. C7510 to C7515: WGMMA serialised. Both run, at a fraction of the speed.
_SLOW = re.compile(r"\bC75(08|1[0-5])\b")


@dataclass
class KernelUsage:
    """Resources of one kernel: registers a thread, static shared memory, stack and spilled bytes."""

    name: str
    registers: int = 0
    shared_bytes: int = 0
    stack_bytes: int = 0
    spill_bytes: int = 0


def kernel_usage(log: str) -> list[KernelUsage]:
    """Resources of every kernel in the output of `nvcc -Xptxas=-v`, in its order."""
    kernels: list[KernelUsage] = []
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            kernels.append(KernelUsage(entry["name"]))
        elif not kernels:
            continue
        elif spills := _SPILLS.search(line):
            # Functions that are called, not inlined, follow their kernel and count for it.
            kernels[-1].stack_bytes += int(spills["stack"])
            kernels[-1].spill_bytes += int(spills["stores"]) + int(spills["loads"])
        elif registers := _REGISTERS.search(line):
            shared = _SHARED.search(line)
            kernels[-1].registers = int(registers["count"])
            kernels[-1].shared_bytes = int(shared["bytes"]) if shared else 0
    return kernels


def faults(log: str) -> list[str]:
    """Lines of the output that must fail a build: spills by kernel, and warnings of ignored or serialised code."""
    spilled = [f"{k.name} spills {k.spill_bytes} bytes of registers" for k in kernel_usage(log) if k.spill_bytes]
    return spilled + [line.strip() for line in log.splitlines() if _SLOW.search(line)]
