// How a product of E4M3 weights with 16-bit activations is spread over the card. Needs nothing but C++17, so that a
// host compiler can test it.

#pragma once

#include <cstdint>

#include "gemm_plan.h"

namespace fut {

inline constexpr int kW8a16Channels = 128;  // of a tile: two consumer warpgroups of 64
inline constexpr int kW8a16Stage = 64;      // of K
inline constexpr int kW8a16MostSplits = 16;

struct W8a16Plan {
  int32_t tokens;  // of a tile: 16, 32, 64, 128 or 256
  int32_t splits;  // parts of K that different CTAs sum
  float clocks;    // what the model expects
};

// Stages of K in one split, the last split's may be fewer; none is empty.
FUT_HD constexpr int32_t stages_a_split(int32_t stages, int32_t splits) {
  return static_cast<int32_t>(ceil_divide(stages, splits));
}

FUT_HD constexpr int64_t w8a16_tiles(int64_t m, int64_t n, int tokens) {
  return ceil_divide(m, tokens) * ceil_divide(n, kW8a16Channels);
}

// Partial sums of all splits in FP32, then a counter for each warpgroup of each tile, which must be zero before the
// first use and is left zero.
FUT_HD constexpr int64_t w8a16_workspace_bytes(int64_t m, int64_t n, const W8a16Plan& plan) {
  if (plan.splits == 1) return 0;
  const int64_t tiles = w8a16_tiles(m, n, plan.tokens);
  return tiles * (plan.splits * int64_t{4} * kW8a16Channels * plan.tokens + 2 * int64_t{4});
}

// Predicted, not fitted: no card has run it.
struct W8a16Cost {
  static constexpr double kMemoryBytes = 18.5;  // bytes a clock and SM from memory
  static constexpr double kConvert = 220.0;     // clocks to convert a stage of weights, both warpgroups
  static constexpr double kUnit = 2500.0;       // first copy to first product, and the epilogue
  static constexpr double kMerge = 1500.0;      // a split's partial sums: written, counted, and for the last read again
};

constexpr double w8a16_clocks(int64_t m, int64_t n, int64_t k, int tokens, int splits, int sm_count) {
  const int64_t units = w8a16_tiles(m, n, tokens) * splits;
  const auto stages = static_cast<double>(stages_a_split(static_cast<int32_t>(ceil_divide(k, kW8a16Stage)), splits));
  const double tensor = 4.0 * tokens;
  // Activations are in the L2 after their first use.
  const double loaded = (kW8a16Channels * kW8a16Stage) / W8a16Cost::kMemoryBytes + tokens * 2.0 * kW8a16Stage / 64.0;
  const double stage = tensor > loaded ? (tensor > W8a16Cost::kConvert ? tensor : W8a16Cost::kConvert)
                                       : (loaded > W8a16Cost::kConvert ? loaded : W8a16Cost::kConvert);
  const double unit = stages * stage + W8a16Cost::kUnit + (splits > 1 ? W8a16Cost::kMerge : 0.0);
  return static_cast<double>(ceil_divide(units, sm_count)) * unit;
}

// The cheapest plan: the narrowest tile that holds all tokens, or tiles of 256.
constexpr W8a16Plan plan_w8a16(int64_t m, int64_t n, int64_t k, int sm_count) {
  int tokens = 16;
  while (tokens < m && tokens < 256) tokens *= 2;
  W8a16Plan best = {tokens, 0, 0.f};
  double fewest = 0;
  const auto stages = static_cast<int32_t>(ceil_divide(k, kW8a16Stage));
  for (int splits = 1; splits <= kW8a16MostSplits; ++splits) {
    // Every split must have a stage.
    if (splits > 1 && stages_a_split(stages, splits) * (splits - 1) >= stages) continue;
    const double clocks = w8a16_clocks(m, n, k, tokens, splits, sm_count);
    if (best.splits != 0 && clocks >= fewest) continue;
    fewest = clocks;
    best = {tokens, splits, static_cast<float>(clocks)};
  }
  return best;
}

}  // namespace fut
