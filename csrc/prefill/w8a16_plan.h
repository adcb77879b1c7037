// How a product of E4M3 weights with 16-bit activations is spread over the card. Needs nothing but C++17, so that a
// host compiler can test it.

#pragma once

#include <cstdint>

#include "gemm_plan.h"

namespace fut {

// Channels of a tile: two consumer warpgroups share one of 128, or take turns, each with tiles of 64 of its own.
inline constexpr int kW8a16Cooperative = 128, kW8a16PingPong = 64;
inline constexpr int kW8a16MostPingPongTokens = 64;
inline constexpr int kW8a16Stage = 64;  // of K
inline constexpr int kW8a16MostSplits = 16;

struct W8a16Plan {
  int32_t channels;  // of a tile: kW8a16Cooperative, or kW8a16PingPong with at most kW8a16MostPingPongTokens
  int32_t tokens;    // of a tile: 16, 32, 64, 128 or 256
  int32_t splits;    // parts of K that different CTAs sum
  float clocks;      // what the model expects
};

// Stages of K in one split, the last split's may be fewer; none is empty.
FUT_HD constexpr int32_t stages_a_split(int32_t stages, int32_t splits) {
  return static_cast<int32_t>(ceil_divide(stages, splits));
}

FUT_HD constexpr int64_t w8a16_tiles(int64_t m, int64_t n, int channels, int tokens) {
  return ceil_divide(m, tokens) * ceil_divide(n, channels);
}

// Partial sums of all splits in FP32, then a counter for every 64 channels of each tile, which must be zero before the
// first use and is left zero.
FUT_HD constexpr int64_t w8a16_workspace_bytes(int64_t m, int64_t n, const W8a16Plan& plan) {
  if (plan.splits == 1) return 0;
  const int64_t tiles = w8a16_tiles(m, n, plan.channels, plan.tokens);
  return tiles * (plan.splits * int64_t{4} * plan.channels * plan.tokens + plan.channels / 64 * int64_t{4});
}

// Clocks, fitted to one H200 (benchmarks/results/w8a16.jsonl; tests/test_w8a16_plan.py holds the choices against it).
struct W8a16Cost {
  static constexpr double kMemoryBytes = 18.5;  // bytes a clock and SM from memory
  static constexpr double kL2Bytes = 64.0;      // and from the L2
  static constexpr double kTensor = 1.16;       // times more than the tensor cores' rate says
  // A stage of 64 channels: loading, converting and multiplying, with both warpgroups at it and with one.
  static constexpr double kStage = 330.0, kStageToken = 0.55;
  static constexpr double kAlone = 420.0, kAloneToken = 1.2;
  static constexpr double kUnit = 2600.0;  // first copy to first product, and the epilogue
  // Partial sums: written and read again for each split, and waited for once.
  static constexpr double kMergeSplit = 400.0, kMergeSplitToken = 11.0, kMergeToken = 20.0;
};

constexpr double larger(double a, double b) { return a > b ? a : b; }

constexpr double w8a16_clocks(int64_t m, int64_t n, int64_t k, const W8a16Plan& plan, int sm_count) {
  const int64_t units = w8a16_tiles(m, n, plan.channels, plan.tokens) * plan.splits;
  const auto rounds = static_cast<double>(ceil_divide(units, sm_count));
  const auto all_stages = static_cast<int32_t>(ceil_divide(k, kW8a16Stage));
  const auto stages = static_cast<double>(stages_a_split(all_stages, plan.splits));
  const double parts = plan.channels / 64.0;
  const bool in_turns = plan.channels == kW8a16PingPong;
  // Activations are in the L2 after their first use.
  const double loaded =
      (plan.channels * kW8a16Stage) / W8a16Cost::kMemoryBytes + plan.tokens * 2.0 * kW8a16Stage / W8a16Cost::kL2Bytes;
  const double tensor = W8a16Cost::kTensor * 2.0 * plan.tokens * parts;
  const double issued = in_turns ? W8a16Cost::kAlone + W8a16Cost::kAloneToken * plan.tokens
                                 : parts * (W8a16Cost::kStage + W8a16Cost::kStageToken * plan.tokens);
  const double multiply = stages * larger(larger(tensor, loaded), issued);
  const double merge = plan.splits == 1
                           ? 0.0
                           : W8a16Cost::kMergeToken * plan.tokens +
                                 plan.splits * (W8a16Cost::kMergeSplit + W8a16Cost::kMergeSplitToken * plan.tokens);
  const double finish = W8a16Cost::kUnit + merge;
  // Taking turns, one warpgroup's end of a tile lies under the other's products, or the other way round.
  if (in_turns) return (rounds - 1.0) * larger(multiply, (multiply + finish) / 2.0) + multiply + finish;
  return rounds * (multiply + finish);
}

// The cheapest plan: the narrowest tile that holds all tokens, or tiles of 256.
constexpr W8a16Plan plan_w8a16(int64_t m, int64_t n, int64_t k, int sm_count) {
  int tokens = 16;
  while (tokens < m && tokens < 256) tokens *= 2;
  W8a16Plan best = {};
  double fewest = 0;
  const auto stages = static_cast<int32_t>(ceil_divide(k, kW8a16Stage));
  for (const int channels : {kW8a16Cooperative, kW8a16PingPong}) {
    if (channels == kW8a16PingPong && tokens > kW8a16MostPingPongTokens) continue;
    for (int splits = 1; splits <= kW8a16MostSplits; ++splits) {
      // Every split must have a stage.
      if (splits > 1 && stages_a_split(stages, splits) * (splits - 1) >= stages) continue;
      const W8a16Plan plan = {channels, tokens, splits, 0.f};
      const double clocks = w8a16_clocks(m, n, k, plan, sm_count);
      if (best.splits != 0 && clocks >= fewest) continue;
      fewest = clocks;
      best = {channels, tokens, splits, static_cast<float>(clocks)};
    }
  }
  return best;
}

}  // namespace fut
