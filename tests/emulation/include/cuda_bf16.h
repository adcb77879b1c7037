#pragma once
#include "emulation.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  uint32_t word = __float_as_uint(value);
  if (value != value) return {0x7fff};
  word += 0x7fff + (word >> 16 & 1);
  return {static_cast<uint16_t>(word >> 16)};
}
inline __nv_bfloat16 __float2bfloat16(float value) { return __float2bfloat16_rn(value); }
inline float __bfloat162float(__nv_bfloat16 value) { return __uint_as_float(static_cast<uint32_t>(value.bits) << 16); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t bits) { return {bits}; }
