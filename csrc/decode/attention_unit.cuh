// What a warp keeps while it goes through its tokens a unit at a time: queries, running softmax, the sum over values.
//
// S^T = K q has tokens on m16 and query heads on n8; its fragments, transposed by movmatrix, are the B operand of
// O^T = V^T p. A lane (g = lane / 4, t = lane % 4) sees tokens g, g + 8, ... of the unit and heads 2 t, 2 t + 1 of
// every head tile, in S, p and O alike.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../ptx/mma.cuh"
#include "../ptx/thread.cuh"
#include "head_vector.cuh"
#include "kv_block.cuh"

namespace fut {

// Exponents are in base 2. The maximum is raised, and all sums with it rescaled, only when a score exceeds it by more
// than this: p stays at most 2^kSlack.
inline constexpr float kSlack = 6.0f;
// p s_v is an FP16 operand, times a power of two that follows the largest s_v met so far: s_v times that factor is at
// most kLargestValue, so p s_v stays below 2^15, and the largest token's at p = 1 starts 21 octaves above the
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

}  // namespace fut
