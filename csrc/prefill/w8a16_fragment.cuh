// E4M3 weights from shared memory into registers as a 16-bit A operand of wgmma (wgmma_registers.cuh).

#pragma once

#include "../ptx/wgmma_registers.cuh"
#include "w8a16_plan.h"

namespace fut {

// A stage of weights in shared memory: rows of 64 bytes in the swizzle of 64 bytes.
__device__ __forceinline__ uint32_t weight_pair(const uint8_t* stage, int row, int column) {
  const int chunk = (column >> 4) ^ (row >> 1 & 3);
  return *reinterpret_cast<const uint16_t*>(stage + row * kW8a16Stage + 16 * chunk + (column & 15));
}

// Two E4M3 codes (low 16 bits) to two 16-bit floats: the code's exponent and mantissa go below the sign as they are,
// which is exact (subnormal codes become subnormal numbers) and leaves a power of two.
__device__ __forceinline__ uint32_t widen(Bf16, uint32_t pair) {
  const uint32_t high = __byte_perm(pair, 0, 0x1404);                                  // codes in the high bytes
  return scale_bf16x2((high >> 4 & 0x07f007f0u) | (high & 0x80008000u), 0x7b807b80u);  // 2^120
}
// The power of two, 2^8, is left to the epilogue: FP16 holds what is not multiplied with it, BF16's products would not
// be FP32.
__device__ __forceinline__ uint32_t widen(Fp16, uint32_t pair) {
  const uint32_t high = __byte_perm(pair, 0, 0x1404);
  return (high >> 1 & 0x3f803f80u) | (high & 0x80008000u);
}

template <class Activation>
constexpr float kWidened = 1.f;  // what the accumulators have to be multiplied with
template <>
inline constexpr float kWidened<Fp16> = 256.f;

using StageFragments = uint32_t[kW8a16Stage / 16][4];

// A warp's 16 rows of a stage, `row` the lane's upper one.
template <class Activation>
__device__ __forceinline__ void load_fragments(StageFragments& fragments, const uint8_t* stage, int row, int lane) {
#pragma unroll
  for (int step = 0; step < kW8a16Stage / 16; ++step) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int column = 16 * step + 2 * (lane & 3) + 8 * (r >> 1);
      fragments[step][r] = widen(Activation{}, weight_pair(stage, row + 8 * (r & 1), column));
    }
  }
}

}  // namespace fut
