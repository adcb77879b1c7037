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

// A row's tempered softmax, unnormalised and in fixed point: the most probable token weighs 2^45.
//
// 2^(n/32 + r/32) for a whole n and |r| <= 1/2 is 2^(n/32) from a table of 32 and a polynomial in r: half the FP64
// operations of exp(), which are what a pass over the row takes its time for. Off by less than one unit.
class Softmax {
 public:
  static constexpr int kTableSize = 32;

  // Fills entry `index` of a table in shared memory.
  static __device__ __forceinline__ void fill(double* table, int index) {
    table[index] = exp2(static_cast<double>(index) / kTableSize);
  }

  __device__ __forceinline__ Softmax(float top, float temperature, const double* table)
      : top_(top), scale_(kTableSize / kLn2 / temperature), table_(table) {}

  __device__ __forceinline__ float top() const { return top_; }

  // The logit less the largest one, exact but for subnormal bits.
  __device__ __forceinline__ double distance(uint32_t key) const { return static_cast<double>(key_value(key)) - top_; }

  __device__ __forceinline__ uint64_t weight(double distance) const {
    const double scaled = distance * scale_;
    if (!(scaled >= kZeroScaled)) return 0;
    constexpr double kRound = 6755399441055744.0;  // 1.5 · 2^52: adding it rounds to a whole number, the low word
    const double shifted = scaled + kRound;
    const int n = __double2loint(shifted);
    const double rest = scaled - (shifted - kRound);
    constexpr double kX = kLn2 / kTableSize;
    double power = fma(rest, kX * kX * kX * kX * kX / 120, kX * kX * kX * kX / 24);
    power = fma(rest, power, kX * kX * kX / 6);
    power = fma(rest, power, kX * kX / 2);
    power = fma(rest, power, kX);
    power = fma(rest, power, 1.0);
    const double step = table_[n & (kTableSize - 1)];
    const double base = __hiloint2double(__double2hiint(step) + (n >> 5) * (1 << 20), __double2loint(step));
    // The sum with 128 has its last bit at 2^-45.
    return __double_as_longlong(fma(base, power, 128.0)) - __double_as_longlong(128.0);
  }

  // Logits farther than this below the top, in FP32, weigh nothing: exp(-32) < 2^-46.
  static __device__ __forceinline__ float reach(float temperature) { return 32.0f * temperature; }

 private:
  static constexpr double kLn2 = 0.693147180559945309;
  static constexpr double kZeroScaled = -46.5 * kTableSize;

  double top_, scale_;
  const double* table_;
};

}  // namespace fut
