#pragma once
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "mma.cuh"

namespace fut {

inline uint32_t pack_bf16(float low, float high) {
  return static_cast<uint32_t>(__float2bfloat16_rn(low).bits) | static_cast<uint32_t>(__float2bfloat16_rn(high).bits)
                                                                    << 16;
}
inline float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
inline float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
inline uint32_t pack_fp16(float low, float high) {
  return static_cast<uint32_t>(emulation::bits(__floats2half2_rn(low, high)));
}
inline uint32_t scale_bf16x2(uint32_t pair, uint32_t factors) {
  return pack_bf16(low_bf16(pair) * low_bf16(factors), high_bf16(pair) * high_bf16(factors));
}

// The nearest code, of equally near ones the even.
inline uint8_t e4m3_code(float value) {
  if (std::isnan(value)) return 0x7f;
  const float size = std::min(std::fabs(value), 448.0f);
  int below = 0;
  while (below < 0x7e && e4m3_value(static_cast<uint8_t>(below + 1)) <= size) ++below;
  if (below < 0x7e) {
    const float down = size - e4m3_value(static_cast<uint8_t>(below));
    const float up = e4m3_value(static_cast<uint8_t>(below + 1)) - size;
    below += up < down || (up == down && below % 2 == 1);
  }
  return static_cast<uint8_t>(below | (std::signbit(value) ? 0x80 : 0));
}
inline uint32_t pack_e4m3(float low, float high) {
  return e4m3_code(low) | static_cast<uint32_t>(e4m3_code(high)) << 8;
}

inline float max_with_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b); }

}  // namespace fut
