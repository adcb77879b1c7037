// What a warp does with 16 tokens of a BF16 block.

#pragma once

#include "attention_unit.cuh"
#include "kv_block.cuh"

namespace fut {

// 16 tokens of a BF16 block: `unit` holds their keys, then their values.
template <int kDim, int kHeadTiles>
struct Bf16Unit {
  using Block = Bf16Block<kDim>;
  static constexpr int kTokens = 16;
  static constexpr int kTiles = kDim / 16;

  // Tokens `limit` and above do not exist. Their values are zeroed, for 0 times NaN is NaN.
  __device__ static __forceinline__ void attend(const uint8_t* unit, int limit, int lane,
                                                const QueryFragments<kDim, kHeadTiles>& query,
                                                RunningSums<kDim, kHeadTiles>& sums) {
    const int g = lane >> 2;
    float product[kHeadTiles][4] = {};
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      uint32_t low[2];
      uint32_t high[2];
      load_words(unit + Block::key_words(0, i, lane), low);
      load_words(unit + Block::key_words(1, i, lane), high);
      uint32_t b[kHeadTiles][2];
      query.load(i, b);
#pragma unroll
      for (int n = 0; n < kHeadTiles; ++n) {
        mma_bf16(product[n], low[0], high[0], low[1], high[1], b[n][0], b[n][1]);
      }
    }
    HeadValues<kHeadTiles> highest;
    bool outgrown = false;
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
      const float4 constants = query.constants(n);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        product[n][r] *= r & 1 ? constants.w : constants.y;
        if (8 * (r >> 1) + g >= limit) product[n][r] = -INFINITY;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        highest[n][h] = fmaxf(product[n][h], product[n][h + 2]);
        outgrown |= highest[n][h] > sums.top[n][h] + kSlack;
      }
    }
    if (__any_sync(~0u, outgrown)) rescale(sums, highest, 0.0f);

    uint32_t weight[kHeadTiles][2];
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float p[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          p[h] = exp2_fast(product[n][2 * k + h] - sums.top[n][h]);
          sums.total[n][h] += p[h];
        }
        weight[n][k] = transpose_8x8(bf16_pair(p[0], p[1]));
      }
    }
    const int first = 2 * (lane & 3);
    const uint32_t low_mask = (first < limit ? 0xffffu : 0u) | (first + 1 < limit ? 0xffff0000u : 0u);
    const uint32_t high_mask = (first + 8 < limit ? 0xffffu : 0u) | (first + 9 < limit ? 0xffff0000u : 0u);
    const uint8_t* values = unit + Block::kSixteenTokens;
#pragma unroll
    for (int c = 0; c < kTiles; ++c) {
      uint32_t a[4];
      load_words(values + (c * 32 + lane) * 16, a);
#pragma unroll
      for (int n = 0; n < kHeadTiles; ++n) {
        mma_bf16(sums.out[c][n], a[0] & low_mask, a[1] & low_mask, a[2] & high_mask, a[3] & high_mask, weight[n][0],
                 weight[n][1]);
      }
    }
  }
};

}  // namespace fut
