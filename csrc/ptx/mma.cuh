// mma.sync.m16n8k16 with FP32 accumulators, and the conversions that feed it (PTX ISA, mma fragments).

#pragma once

#include <cstdint>

namespace fut {

// d += a · b: a 16 x 16 (row), b 16 x 8 (column), FP16.
__device__ __forceinline__ void mma_fp16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same in BF16.
__device__ __forceinline__ void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Transposes an 8 x 8 matrix of 16-bit elements over the warp: lane l holds row l / 4, columns 2 (l % 4) and the next.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t rows) {
  uint32_t columns;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
  return columns;
}

// (word & mask) | magic in one instruction.
template <uint32_t kMask, uint32_t kMagic>
__device__ __forceinline__ uint32_t pick_bits(uint32_t word) {
  uint32_t picked;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(picked) : "r"(word), "n"(kMask), "n"(kMagic));
  return picked;
}

// Two E4M3 values (the low 16 bits) to two FP16 ones, exactly.
__device__ __forceinline__ uint32_t e4m3x2_to_fp16x2(uint16_t pair) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  return halves;
}

}  // namespace fut
