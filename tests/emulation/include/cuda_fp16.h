#pragma once
#include "emulation.h"

struct __half {
  _Float16 value;
};
struct __half2 {
  _Float16 x, y;
};
inline __half2 __floats2half2_rn(float x, float y) { return {static_cast<_Float16>(x), static_cast<_Float16>(y)}; }
inline __half __float2half_rn(float value) { return {static_cast<_Float16>(value)}; }
inline float2 __half22float2(__half2 pair) { return {static_cast<float>(pair.x), static_cast<float>(pair.y)}; }
inline uint16_t __half_as_ushort(__half half) { return static_cast<uint16_t>(emulation::bits(half.value)); }
inline __half __ushort_as_half(uint16_t bits) { return {emulation::from_bits<_Float16>(bits)}; }
inline __half2 __half2half2(__half half) { return {half.value, half.value}; }
inline __half2 __hsub2(__half2 a, __half2 b) {
  return __floats2half2_rn(static_cast<float>(a.x) - static_cast<float>(b.x),
                           static_cast<float>(a.y) - static_cast<float>(b.y));
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return {static_cast<_Float16>(static_cast<double>(a.x) * static_cast<double>(b.x) + static_cast<double>(c.x)),
          static_cast<_Float16>(static_cast<double>(a.y) * static_cast<double>(b.y) + static_cast<double>(c.y))};
}
