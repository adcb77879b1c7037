// Logits as integers: keys that sort as the logits do, and softmax weights in fixed point.
//
// Integer sums do not depend on their order. That makes the chosen token the same whatever the number of thread blocks,
// the schedule and the other rows are, without a fixed order of summation.

#pragma once

#include <cstdint>

namespace fut {

// Keys of NaN, +inf and -inf. NaN sorts above everything so that a maximum cannot hide it.
inline constexpr uint32_t kKeyNan = 0xffffffffu;
inline constexpr uint32_t kKeyPositiveInfinity = 0xff800000u;
inline constexpr uint32_t kKeyNegativeInfinity = 0x007fffffu;

// Unsigned keys in the order of the floats; both zeros have the same.
__device__ __forceinline__ uint32_t order_key(float x) {
  if (x != x) return kKeyNan;
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 + 0 = +0
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float key_value(uint32_t key) {
  return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

// Key and token id in one number: larger logits first, of equal ones the lower id.
__device__ __forceinline__ uint64_t rank_of(uint32_t key, uint32_t id) {
  return static_cast<uint64_t>(key) << 32 | static_cast<uint32_t>(~id);
}
__device__ __forceinline__ uint32_t rank_key(uint64_t rank) { return static_cast<uint32_t>(rank >> 32); }
__device__ __forceinline__ uint32_t rank_id(uint64_t rank) { return ~static_cast<uint32_t>(rank); }

// A row's tempered softmax, unnormalised: the most probable token weighs 2^45.
struct Softmax {
  double top;
  double inverse_temperature;

  __device__ __forceinline__ double exponent(uint32_t key) const {
    return (static_cast<double>(key_value(key)) - top) * inverse_temperature;
  }

  // round(2^45 · exp(exponent)), ties to even: the sum with 128 has its last bit at 2^-45.
  static __device__ __forceinline__ uint64_t weight(double exponent) {
    return __double_as_longlong(exp(exponent) + 128.0) - __double_as_longlong(128.0);
  }
};

// Below this exponent a weight rounds to zero; -46 ln 2 = -31.88.
inline constexpr double kZeroWeightExponent = -32.0;

}  // namespace fut
