// Brings a launch's activations into shared memory as a projection's MMA reads them.
//
// x [tokens, cols] in BF16; RMSNorm's factor and gain are multiplied in and the result is rounded to BF16, which is
// what docs/numerics.md lets enter a product. FP16 holds such a value exactly once a power of two has brought the
// largest of its slice and token to at least 2^14; the power comes out again with the partial sum, exactly. It belongs
// to a slice and token, so that it does not depend on the launch.
//
// Inside 32 (INT4) or 64 (E4M3) columns, values are permuted so that a lane's B fragments of two MMAs are 16 bytes.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../ptx/bulk_copy.cuh"
#include "projection_params.cuh"

namespace fut {

// The values of odd k16 tiles enter an INT4 product divided by 16, because their codes stand as 1024 + 16 q. What the
// codes add to their values q - 8 is then this, times the activation as it enters.
inline constexpr float kOddScale = 0.0625f;
inline constexpr float kEvenOffset = 1024.f + 8.f;
inline constexpr float kOddOffset = 1024.f + 16.f * 8.f;

// RMSNorm's factor of each token, from partial sums in a fixed order: one warp a token.
__device__ __forceinline__ void reduce_row_factors(const ProjectionParams& p, float* row_factors, int warp, int lane) {
  for (int token = warp; token < p.tokens; token += kProjectionWarps) {
    const int source = p.gather == nullptr ? token : p.gather[token];
    const float* parts = p.square_sums + static_cast<int64_t>(source) * p.square_parts;
    float sum = 0.f;
#pragma unroll 8
    for (int i = lane; i < p.square_parts; i += 32) sum += parts[i];
#pragma unroll
    for (int distance = 16; distance; distance >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane == 0) row_factors[token] = rsqrtf(sum / static_cast<float>(p.cols) + p.eps);
  }
}

// Starts the copy of a token's values of a slice into shared memory, as they are, with zeros past the matrix.
__device__ __forceinline__ void fetch_activations(const ProjectionParams& p, int token, int begin, int chunks,
                                                  uint8_t* to, int lane) {
  const int source = p.gather == nullptr ? token : p.gather[token];
  const __nv_bfloat16* from = p.x + static_cast<int64_t>(source) * p.cols;
  for (int chunk = lane; chunk < chunks; chunk += 32) {
    const int column = begin + 8 * chunk;
    if (p.cols % 8 == 0 && column + 8 <= p.cols) {
      cp_async_16(to + 16 * chunk, from + column);
    } else {
      __nv_bfloat16* place = reinterpret_cast<__nv_bfloat16*>(to + 16 * chunk);
#pragma unroll
      for (int i = 0; i < 8; ++i) place[i] = column + i < p.cols ? from[column + i] : __float2bfloat16(0.f);
    }
  }
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ uint32_t pack_fp16(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// The power of two that brings `maximum` into [2^14, 2^15), as far as FP32 can hold it; 1 for zero.
__device__ __forceinline__ float fp16_factor(float maximum) {
  const int exponent = static_cast<int>(__float_as_uint(maximum) >> 23);
  const int wanted = min(268 - exponent, 253);
  return maximum == 0.f ? 1.f : __uint_as_float(static_cast<uint32_t>(wanted) << 23);
}

// The BF16 operand: RMSNorm's factor and gain multiplied in, where there are any.
__device__ __forceinline__ uint4 normalize(const ProjectionParams& p, uint4 raw, float factor, int column) {
  uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  float gain[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) gain[e] = 1.f;
  if (p.gain != nullptr) {
    if (p.cols % 4 == 0 && column + 8 <= p.cols) {
      const float4 first = __ldg(reinterpret_cast<const float4*>(p.gain + column));
      const float4 second = __ldg(reinterpret_cast<const float4*>(p.gain + column) + 1);
      gain[0] = first.x, gain[1] = first.y, gain[2] = first.z, gain[3] = first.w;
      gain[4] = second.x, gain[5] = second.y, gain[6] = second.z, gain[7] = second.w;
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (column + e < p.cols) gain[e] = p.gain[column + e];
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e)
    words[e] = pack_bf16(__uint_as_float(words[e] << 16) * factor * gain[2 * e],
                         __uint_as_float(words[e] & 0xffff0000u) * factor * gain[2 * e + 1]);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ unsigned largest_magnitude(uint4 packed) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
  unsigned most = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) most = max(most, max(words[e] << 16 & 0x7fffffffu, words[e] & 0x7fff0000u));
  return most;
}

// Turns a token's slice, `chunks` of eight BF16 values at `row`, into what the MMAs read; a warp together.
// `corrections` is the token's entry of the slice's first group. Returns what the slice's sum must be multiplied by.
template <int kFormat, int kGroup, int kTokenTiles>
__device__ __forceinline__ float convert_slice(const ProjectionParams& p, uint8_t* row, float* corrections, int begin,
                                               int chunks, float row_factor, int lane) {
  unsigned most = 0;
  for (int chunk = lane; chunk < chunks; chunk += 32) {
    uint4* place = reinterpret_cast<uint4*>(row + 16 * chunk);
    uint4 packed = *place;
    if (p.square_sums != nullptr) {
      packed = normalize(p, packed, row_factor, begin + 8 * chunk);
      *place = packed;
    }
    most = max(most, largest_magnitude(packed));
  }
  if constexpr (kFormat == FUT_BF16) return 1.f;
  const float factor = fp16_factor(__uint_as_float(__reduce_max_sync(0xffffffffu, most)));
  for (int first = 0; first < chunks; first += 32) {
    const int chunk = first + lane;
    const bool real = chunk < chunks;
    uint4 packed = make_uint4(0, 0, 0, 0);
    if (real) packed = *reinterpret_cast<const uint4*>(row + 16 * chunk);
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
    uint32_t halves[4];
    float sum = 0.f;
    const bool odd = kFormat == FUT_INT4 && (chunk >> 1 & 1);
    const float multiplier = odd ? factor * kOddScale : factor;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      halves[e] =
          pack_fp16(__uint_as_float(words[e] << 16) * multiplier, __uint_as_float(words[e] & 0xffff0000u) * multiplier);
      const float2 kept = __half22float2(*reinterpret_cast<const __half2*>(&halves[e]));
      sum += kept.x + kept.y;
    }
    __syncwarp();  // the lanes of a block have read before any of them writes
    if constexpr (kFormat == FUT_INT4) {
      if (real) {
        uint8_t* to = row + (chunk & ~3) * 16 + (chunk & 3) * 4;
#pragma unroll
        for (int t = 0; t < 4; ++t) *reinterpret_cast<uint32_t*>(to + t * 16) = halves[t];
      }
      sum *= odd ? kOddOffset : kEvenOffset;
#pragma unroll
      for (int distance = 1; distance < kGroup / 8; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      if (real && chunk * 8 % kGroup == 0) corrections[chunk * 8 / kGroup * (8 * kTokenTiles)] = sum;
    } else {
      if (real)
        *reinterpret_cast<uint4*>(row + ((chunk & ~7) + (chunk & 1) * 4 + (chunk >> 1 & 3)) * 16) =
            make_uint4(halves[0], halves[1], halves[2], halves[3]);
    }
  }
  return 1.f / factor;
}

}  // namespace fut
