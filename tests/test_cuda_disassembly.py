"""Reading machine code, and what it says about the kernels of the library that was built here."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from csrc.build import LIBRARY, build_library
from csrc.disassembly import Kernel, ToolsMissingError, parse, problems, read_kernels
from csrc.nvcc import Nvcc
from fut_runtime.cuda.library import Library
from repository import REPOSITORY

CODE = """
	code for sm_90a
		Function : _Z7projectPf
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;            /* 0x00000a00ff017b82 */
                                                                     /* 0x000fe20000000800 */
        /*0010*/              @!P0 HMMA.16816.F32 R4, R4, R8, R4 ;   /* 0x00008400ff027b82 */
        /*1020*/             @!UP1 UBLKCP.S.G [UR8], [UR10], UR12 ;  /* 0x00008400ff027b82 */
        /*1030*/              @PT  HMMA.16816.F32.BF16 R4, R4, R8, R4 ;
		Function : _Z5otherPf
        /*0000*/                   STL.64 [R1+0x10], R2 ;            /* 0x00000a00ff017b82 */
"""
USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function _Z7projectPf:
  REG:168 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:536 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _Z5otherPf:
  REG:40 STACK:16 SHARED:0 LOCAL:0 CONSTANT[0]:536 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
#: Two kernels: one multiplies by tensor cores, the other keeps an array that only local memory can hold.
KERNELS = """
#include "fut.h"
extern "C" __global__ void project(float* d, const unsigned* a) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]));
}
extern "C" __global__ void indexed(int* x) {
  int local[32];
  for (int i = 0; i < 32; ++i) local[i] = x[i];
  for (int i = 0; i < 64; ++i) x[i] = local[x[i] & 31]++;
}
int fut_nothing(void) { return 0; }
"""


def test_counts_instructions_and_resources() -> None:
    kernels = parse(CODE, USAGE)
    project, other = kernels["_Z7projectPf"], kernels["_Z5otherPf"]
    assert project.instructions == {"LDC": 1, "HMMA": 2, "UBLKCP": 1}
    assert (project.registers, project.shared_bytes, project.stack_bytes) == (168, 1024, 0)
    assert other.instructions == {"STL": 1} and (other.registers, other.stack_bytes) == (40, 16)
    assert problems(list(kernels.values())) == ["_Z5otherPf: holds 1 STL"]


def test_a_kernel_must_hold_what_its_name_promises() -> None:
    eight_bit = Kernel("fut::gemm<fut::E4m3, 256>", instructions=Counter(QGMMA=8, USETMAXREG=2))
    assert problems([Kernel("fut::project_int4<1>"), Kernel("sample"), eight_bit]) == [
        "fut::project_int4<1>: holds no HMMA",
        "fut::project_int4<1>: holds no UBLKCP",
        "fut::gemm<fut::E4m3, 256>: holds no UTMALDG",
    ]


def kernels_of(library: Path) -> dict[str, Kernel]:
    try:
        return {kernel.name: kernel for kernel in read_kernels(library)}
    except ToolsMissingError as error:
        pytest.skip(str(error))


def test_reads_what_nvcc_makes(tmp_path: Path, nvcc: Nvcc) -> None:
    (tmp_path / "fut.h").write_text(
        '#define FUT_API __attribute__((visibility("default")))\nextern "C" {\nFUT_API int fut_nothing(void);\n}\n'
    )
    (tmp_path / "two.cu").write_text(KERNELS)
    build_library(tmp_path / "two.so", nvcc, sources=tmp_path, cache=tmp_path / "cache", report=lambda _: None)
    kernels = kernels_of(tmp_path / "two.so")
    assert set(kernels) == {"project", "indexed"}
    assert kernels["project"].instructions["HMMA"] >= 1 and kernels["project"].registers > 0
    found = problems(list(kernels.values()))
    assert "project: holds no UBLKCP" in found
    assert any(line.startswith("indexed: holds") and line.endswith("LDL") for line in found)


def test_the_library_that_was_built_here_is_as_it_should_be() -> None:
    path = REPOSITORY / LIBRARY
    if not path.is_file():
        pytest.skip("the CUDA library is not built here: run `make cuda`")
    assert Library(path).path == path
    assert problems(list(kernels_of(path).values())) == []
