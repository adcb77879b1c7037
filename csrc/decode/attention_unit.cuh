// What one warp does with the tokens of a unit: scores, running softmax, and the sum over values.
//
// S^T = K q has tokens on m16 and query heads on n8; its fragments, transposed by movmatrix, are the B operand of
// O^T = V^T p. A lane (g = lane / 4, t = lane % 4) sees tokens g, g + 8, ... of the unit and heads 2 t, 2 t + 1 of
// every head tile, in S, p and O alike.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../ptx/mma.cuh"
#include "head_vector.cuh"
#include "kv_block.cuh"

namespace fut {

// Exponents are in base 2. The maximum is raised, and all sums with it rescaled, only when a score exceeds it by more
// than this: p stays at most 2^kSlack.
inline constexpr float kSlack = 6.0f;
// p s_v is an FP16 operand, times a power of two that follows the largest s_v met so far: s_v times that factor is at
// most 2^kLargestValueExponent, so p s_v stays below 2^15, and the largest token's at p = 1 starts 21 octaves above the
// subnormals.
inline constexpr int kValueExponent = 7;
inline constexpr float kLargestValue = 512.0f;
inline constexpr float kFirstValueFactor = 1099511627776.0f;

// Queries of a group of heads in shared memory: fragments of the B operand, and what turns a product into a score. They
// are read again for every unit: registers are what limits the warps of an SM, not shared memory's bandwidth.
template <int kDim, int kHeadTiles>
class QueryFragments {
 public:
  static constexpr int kBytes = (kDim + 31) / 32 * kHeadTiles * 32 * 16;

  // Byte of the two words of a lane, k16 tile `tile` of 16 dims, heads 8 * head_tile and on.
  FUT_HD static constexpr int words(int tile, int head_tile, int lane) {
    return (((tile >> 1) * kHeadTiles + head_tile) * 32 + lane) * 16 + (tile & 1) * 8;
  }

  // `constants`: [8 * kHeadTiles] of Σq as the operand holds it, and the factor to exponents of base 2.
  __device__ __forceinline__ QueryFragments(const uint8_t* fragments, const float2* constants, int lane)
      : fragments_(fragments + lane * 16), constants_(constants + 2 * (lane & 3)) {}

  __device__ __forceinline__ void load(int tile, uint32_t (&b)[kHeadTiles][2]) const {
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
      const uint2 loaded = *reinterpret_cast<const uint2*>(fragments_ + words(tile, n, 0));
      b[n][0] = loaded.x, b[n][1] = loaded.y;
    }
  }

  __device__ __forceinline__ void load_pair(int pair, uint32_t (&even)[kHeadTiles][2],
                                            uint32_t (&odd)[kHeadTiles][2]) const {
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
      const uint4 loaded = *reinterpret_cast<const uint4*>(fragments_ + words(2 * pair, n, 0));
      even[n][0] = loaded.x, even[n][1] = loaded.y;
      odd[n][0] = loaded.z, odd[n][1] = loaded.w;
    }
  }

  // Σq and factor of this lane's two heads.
  __device__ __forceinline__ float4 constants(int head_tile) const {
    return *reinterpret_cast<const float4*>(constants_ + 8 * head_tile);
  }

 private:
  const uint8_t* fragments_;
  const float2* constants_;
};

// Sums over the tokens met so far, relative to `top`.
template <int kDim, int kHeadTiles>
struct RunningSums {
  float out[kDim / 16][kHeadTiles][4];
  float top[kHeadTiles][2];
  float total[kHeadTiles][2];  // Σ p over this lane's tokens
  float shift[kHeadTiles][2];  // Σ p z_v over this lane's tokens, for values whose codes are centred
  float value_factor;

  __device__ __forceinline__ void clear(float first_value_factor) {
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
      for (int c = 0; c < kDim / 16; ++c) {
#pragma unroll
        for (int r = 0; r < 4; ++r) out[c][n][r] = 0.0f;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[n][h] = -INFINITY;
        total[n][h] = 0.0f;
        shift[n][h] = 0.0f;
      }
    }
    value_factor = first_value_factor;
  }
};

__device__ __forceinline__ float exp2_fast(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// Maximum over the lanes that share heads.
__device__ __forceinline__ float token_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}

__device__ __forceinline__ float token_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 4);
  x += __shfl_xor_sync(~0u, x, 8);
  return x + __shfl_xor_sync(~0u, x, 16);
}

template <int kHeadTiles>
using HeadValues = float[kHeadTiles][2];

// Raises `top` to the unit's scores and the value factor to its scales. All lanes; rare, so that it stays out of line
// of the common path.
template <int kDim, int kHeadTiles>
__device__ __forceinline__ void rescale(RunningSums<kDim, kHeadTiles>& sums, const HeadValues<kHeadTiles>& highest,
                                        float largest_scale) {
  float value_ratio = 1.0f;
  largest_scale = token_max(largest_scale);
  if (largest_scale * sums.value_factor > kLargestValue) {
    const float factor = power_of_two_factor(largest_scale, kValueExponent);
    value_ratio = factor / sums.value_factor;
    sums.value_factor = factor;
  }
#pragma unroll
  for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = fmaxf(sums.top[n][h], token_max(highest[n][h]));
      const float ratio = exp2_fast(sums.top[n][h] - top);
      sums.top[n][h] = top;
      sums.total[n][h] *= ratio;
      sums.shift[n][h] *= ratio;
#pragma unroll
      for (int c = 0; c < kDim / 16; ++c) {
        sums.out[c][n][h] *= ratio * value_ratio;
        sums.out[c][n][h + 2] *= ratio * value_ratio;
      }
    }
  }
}

__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ uint32_t fp16_pair(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

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

template <int kWords>
__device__ __forceinline__ void load_words(const uint8_t* shared, uint32_t (&words)[kWords]) {
  if constexpr (kWords == 4) {
    const uint4 loaded = *reinterpret_cast<const uint4*>(shared);
    words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
  } else if constexpr (kWords == 2) {
    const uint2 loaded = *reinterpret_cast<const uint2*>(shared);
    words[0] = loaded.x, words[1] = loaded.y;
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const uint32_t*>(shared)[i];
  }
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
