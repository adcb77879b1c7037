// What a warp does with 32 tokens of an INT4 block.

#pragma once

#include "attention_unit.cuh"
#include "kv_block.cuh"

namespace fut {

// Codes minus 8 in FP16, exactly: 1024 + q lies in the even nibble places, 1024 + 16 q in the odd ones. Centred codes
// keep the sums small: the rounding of a product with 1024 would show in the mean over a long context.
__device__ __forceinline__ uint32_t centred_even(uint32_t word) {
  const uint32_t biased = pick_bits<kPairMaskEven, kFp16Magic>(word);
  const __half2 centred = __hsub2(*reinterpret_cast<const __half2*>(&biased), __half2half2(__ushort_as_half(0x6408)));
  return *reinterpret_cast<const uint32_t*>(&centred);
}

__device__ __forceinline__ uint32_t centred_odd(uint32_t word) {
  const uint32_t biased = pick_bits<kPairMaskOdd, kFp16Magic>(word);
  const __half2 centred = __hfma2(*reinterpret_cast<const __half2*>(&biased), __half2half2(__ushort_as_half(0x2c00)),
                                  __half2half2(__ushort_as_half(0xd480)));
  return *reinterpret_cast<const uint32_t*>(&centred);
}

// 32 tokens, half of an INT4 block.
template <int kDim, int kHeadTiles>
struct Int4Unit {
  using Block = Int4Block<kDim>;
  static constexpr int kTokens = 32;
  static constexpr int kTiles = kDim / 16;
  static constexpr int kPairs = Block::kTilePairs;

  // Tokens `limit` and above do not exist: their scores are masked, and whatever their scales hold is not used. Their
  // codes are finite whatever they hold.
  __device__ static __forceinline__ void attend(const uint8_t* block, int half, int limit, int lane,
                                                const QueryFragments<kDim, kHeadTiles>& query,
                                                RunningSums<kDim, kHeadTiles>& sums) {
    const int g = lane >> 2;
    float product[2][kHeadTiles][4] = {};
    scores(block, half, lane, query, product);

    uint32_t key_scale[4];
    uint32_t value_scale[4];
    load_words<4>(block + Block::kKeyScales + Block::scale_word(g) + half * 16, key_scale);
    load_words<4>(block + Block::kValueScales + Block::scale_word(g) + half * 16, value_scale);
    const bool partial = limit < kTokens;
    if (partial) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (8 * k + g >= limit) key_scale[k] = value_scale[k] = 0;
      }
    }

    HeadValues<kHeadTiles> query_sum;
    HeadValues<kHeadTiles> query_scale;
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
      const float4 constants = query.constants(n);
      query_sum[n][0] = constants.x, query_scale[n][0] = constants.y;
      query_sum[n][1] = constants.z, query_scale[n][1] = constants.w;
    }
    float score[4][kHeadTiles][2];
    HeadValues<kHeadTiles> highest;
    float largest_scale = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float scale = bf16_low(key_scale[k]);
      const float zero = fmaf(scale, static_cast<float>(kCodesCentre), bf16_high(key_scale[k]));
      largest_scale = fmaxf(largest_scale, bf16_low(value_scale[k]));
#pragma unroll
      for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float unscaled = fmaf(scale, product[k >> 1][n][2 * (k & 1) + h], zero * query_sum[n][h]);
          score[k][n][h] = unscaled * query_scale[n][h];
          if (partial && 8 * k + g >= limit) score[k][n][h] = -INFINITY;
          highest[n][h] = k == 0 ? score[k][n][h] : fmaxf(highest[n][h], score[k][n][h]);
        }
      }
    }
    bool outgrown = largest_scale * sums.value_factor > kLargestValue;
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
      outgrown |= highest[n][0] > sums.top[n][0] + kSlack || highest[n][1] > sums.top[n][1] + kSlack;
    }
    if (__any_sync(~0u, outgrown)) rescale(sums, highest, largest_scale);

    uint32_t weight[2][kHeadTiles][2];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float scale = bf16_low(value_scale[k]);
      const float zero = fmaf(scale, static_cast<float>(kCodesCentre), bf16_high(value_scale[k]));
      const float operand_scale = scale * sums.value_factor;
#pragma unroll
      for (int n = 0; n < kHeadTiles; ++n) {
        float p[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          p[h] = exp2_fast(score[k][n][h] - sums.top[n][h]);
          sums.total[n][h] += p[h];
          sums.shift[n][h] = fmaf(p[h], zero, sums.shift[n][h]);
        }
        weight[k >> 1][n][k & 1] = transpose_8x8(fp16_pair(p[0] * operand_scale, p[1] * operand_scale));
      }
    }
    values(block, half, lane, weight, sums);
  }

 private:
  __device__ static __forceinline__ void scores(const uint8_t* block, int half, int lane,
                                                const QueryFragments<kDim, kHeadTiles>& query,
                                                float (&product)[2][kHeadTiles][4]) {
    uint32_t low[2][kPairs];
    uint32_t high[2][kPairs];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      load_words(block + Block::key_words(4 * half + 2 * m, lane), low[m]);
      load_words(block + Block::key_words(4 * half + 2 * m + 1, lane), high[m]);
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      uint32_t even[kHeadTiles][2];
      uint32_t odd[kHeadTiles][2];
      query.load_pair(i, even, odd);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const uint32_t low_next = low[m][i] >> kPairShift;
        const uint32_t high_next = high[m][i] >> kPairShift;
        multiply(product[m], even, centred_even(low[m][i]), centred_even(high[m][i]), centred_even(low_next),
                 centred_even(high_next));
        multiply(product[m], odd, centred_odd(low[m][i]), centred_odd(high[m][i]), centred_odd(low_next),
                 centred_odd(high_next));
      }
    }
    if constexpr (Block::kLastTile) {
      uint32_t even[kHeadTiles][2];
      query.load(kTiles - 1, even);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const uint32_t word = *reinterpret_cast<const uint32_t*>(block + Block::last_key_word(2 * half + m, lane));
        const uint32_t next = word >> kPairShift;
        multiply(product[m], even, centred_even(word), centred_even(next), centred_odd(word), centred_odd(next));
      }
    }
  }

  __device__ static __forceinline__ void values(const uint8_t* block, int half, int lane,
                                                const uint32_t (&weight)[2][kHeadTiles][2],
                                                RunningSums<kDim, kHeadTiles>& sums) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int k_tile = 2 * half + j;
      uint32_t low[kPairs];
      uint32_t high[kPairs];
      load_words(block + Block::value_words(k_tile, 0, lane), low);
      load_words(block + Block::value_words(k_tile, 1, lane), high);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const uint32_t low_next = low[i] >> kPairShift;
        const uint32_t high_next = high[i] >> kPairShift;
        multiply(sums.out[2 * i], weight[j], centred_even(low[i]), centred_even(low_next), centred_even(high[i]),
                 centred_even(high_next));
        multiply(sums.out[2 * i + 1], weight[j], centred_odd(low[i]), centred_odd(low_next), centred_odd(high[i]),
                 centred_odd(high_next));
      }
      if constexpr (Block::kLastTile) {
        const uint32_t word = *reinterpret_cast<const uint32_t*>(block + Block::last_value_word(k_tile, lane));
        const uint32_t next = word >> kPairShift;
        multiply(sums.out[kTiles - 1], weight[j], centred_even(word), centred_odd(word), centred_even(next),
                 centred_odd(next));
      }
    }
  }

  __device__ static __forceinline__ void multiply(float (&d)[kHeadTiles][4], const uint32_t (&b)[kHeadTiles][2],
                                                  uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) mma_fp16(d[n], a0, a1, a2, a3, b[n][0], b[n][1]);
  }
};

}  // namespace fut
