// mma.sync.m16n8k16 and its operands, from the fragments that PTX ISA describes; sums in FP64.

#pragma once
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "emulation.h"

namespace fut {

template <bool kHalf>
inline double element(uint64_t pair, int half) {
  const auto bits = static_cast<uint16_t>(pair >> (16 * half));
  if (kHalf) return static_cast<double>(emulation::from_bits<_Float16>(bits));
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

template <bool kHalf>
inline void multiply(float (&d)[4], const uint32_t (&registers)[6]) {
  const int lane = emulation::lane();
  double a[2][16], b[16][2];
  for (int r = 0; r < 6; ++r) {
    const uint64_t* all = emulation::warp_gather(registers[r]);
    for (int t = 0; t < 4; ++t)
      for (int h = 0; h < 2; ++h) {
        if (r < 4) {
          a[r & 1][2 * t + h + 8 * (r >> 1)] = element<kHalf>(all[(lane & ~3) + t], h);
        } else {
          for (int n = 0; n < 2; ++n)
            b[2 * t + h + 8 * (r - 4)][n] = element<kHalf>(all[4 * (2 * (lane & 3) + n) + t], h);
        }
      }
  }
  for (int i = 0; i < 4; ++i) {
    double sum = d[i];
    for (int k = 0; k < 16; ++k) sum += a[i >> 1][k] * b[k][i & 1];
    d[i] = static_cast<float>(sum);
  }
}

inline void mma_fp16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  multiply<true>(d, {a0, a1, a2, a3, b0, b1});
}
inline void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  multiply<false>(d, {a0, a1, a2, a3, b0, b1});
}

inline uint32_t transpose_8x8(uint32_t rows) {
  const int lane = emulation::lane();
  const uint64_t* all = emulation::warp_gather(rows);
  uint32_t out = 0;
  for (int h = 0; h < 2; ++h) {
    const int row = 2 * (lane & 3) + h, column = lane >> 2;
    out |= static_cast<uint32_t>(static_cast<uint16_t>(all[row * 4 + (column >> 1)] >> (16 * (column & 1))))
           << (16 * h);
  }
  return out;
}

template <uint32_t kMask, uint32_t kMagic>
inline uint32_t pick_bits(uint32_t word) {
  return (word & kMask) | kMagic;
}

inline float e4m3_value(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                   : std::ldexp(1.0f + static_cast<float>(mantissa) / 8.0f, exponent - 7);
  return code & 0x80 ? -size : size;
}

inline uint32_t e4m3x2_to_fp16x2(uint16_t pair) {
  const __half2 both = __floats2half2_rn(e4m3_value(pair & 0xff), e4m3_value(pair >> 8));
  return static_cast<uint32_t>(emulation::bits(both));
}

}  // namespace fut
