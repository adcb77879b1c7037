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
#include "../ptx/pack.cuh"
#include "../ptx/thread.cuh"
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

// The power of two that brings `maximum` into [2^14, 2^15), as far as FP32 can hold it; 1 for zero.
__device__ __forceinline__ float fp16_factor(float maximum) {
  const int exponent = static_cast<int>(__float_as_uint(maximum) >> 23);
  const int wanted = min(268 - exponent, 253);
  return maximum == 0.f ? 1.f : __uint_as_float(static_cast<uint32_t>(wanted) << 23);
}

__device__ __forceinline__ void load_gain(const ProjectionParams& p, int column, float (&gain)[8]) {
  if (p.cols % 4 == 0 && column + 8 <= p.cols) {
    const float4 first = __ldg(reinterpret_cast<const float4*>(p.gain + column));
    const float4 second = __ldg(reinterpret_cast<const float4*>(p.gain + column) + 1);
    gain[0] = first.x, gain[1] = first.y, gain[2] = first.z, gain[3] = first.w;
    gain[4] = second.x, gain[5] = second.y, gain[6] = second.z, gain[7] = second.w;
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) gain[e] = column + e < p.cols ? p.gain[column + e] : 1.f;
  }
}

// Brings a slice's gains near: they are weights, and need not wait for the activations.
__device__ __forceinline__ void fetch_gains(const ProjectionParams& p, int begin, int chunks, int lane) {
  constexpr int kLine = 32;
  if (p.gain == nullptr) return;
  for (int column = begin + kLine * lane; column < min(begin + 8 * chunks, p.cols); column += 32 * kLine)
    touch(p.gain + column);
}

// The BF16 operand: RMSNorm's factor and gain multiplied in.
__device__ __forceinline__ uint4 normalize(uint4 raw, float factor, const float (&gain)[8]) {
  uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
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

// Turns a chunk into FP16 and puts it where the MMAs read it; all lanes of the warp, which have read what stood there.
// `row`: the token's slice. `corrections`: the token's entry of the slice's first group.
template <int kFormat, int kGroup, int kTokenTiles>
__device__ __forceinline__ void place_chunk(uint4 packed, float factor, uint8_t* row, float* corrections, int chunk,
                                            bool real) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
  const bool odd = kFormat == FUT_INT4 && (chunk >> 1 & 1);
  const float multiplier = odd ? factor * kOddScale : factor;
  uint32_t halves[4];
  float sum = 0.f;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float low = __uint_as_float(words[e] << 16), high = __uint_as_float(words[e] & 0xffff0000u);
    halves[e] = pack_fp16(low * multiplier, high * multiplier);
    sum = __fadd_rn(sum, __fadd_rn(low, high));
  }
  if constexpr (kFormat == FUT_INT4) {
    // A lane of the MMA reads word t of four neighbouring chunks. Which word is stored when differs between blocks of
    // 32 columns, so that the 32 stores of a warp go to 32 banks.
    const int turn = chunk >> 3 & 3;
    uint8_t* const to = row + (chunk & ~3) * 16 + (chunk & 3) * 4;
    const uint32_t pair[4] = {turn & 1 ? halves[1] : halves[0], turn & 1 ? halves[2] : halves[1],
                              turn & 1 ? halves[3] : halves[2], turn & 1 ? halves[0] : halves[3]};
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint32_t word = turn & 2 ? pair[(t + 2) & 3] : pair[t];
      if (real) *reinterpret_cast<uint32_t*>(to + ((t + turn) & 3) * 16) = word;
    }
    // Not contracted with the sums below: the rounding must not depend on the instance of this template.
    sum = __fmul_rn(sum * multiplier, odd ? kOddOffset : kEvenOffset);
#pragma unroll
    for (int distance = 1; distance < kGroup / 8; distance *= 2)
      sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
    if (real && chunk * 8 % kGroup == 0) corrections[chunk * 8 / kGroup * (8 * kTokenTiles)] = -sum;
  } else if (real) {
    *reinterpret_cast<uint4*>(row + ((chunk & ~7) + (chunk & 1) * 4 + (chunk >> 1 & 3)) * 16) =
        make_uint4(halves[0], halves[1], halves[2], halves[3]);
  }
}

// What a warp converts: a slice of K of the tokens token, token + stride, ... of the launch.
struct SliceOfTokens {
  uint8_t* x;          // the slice in the row of token 0
  float* corrections;  // the slice's first group, token 0
  float* factors;      // [kMostTokens]: what the slice's sums must be multiplied by
  const float* row_factors;
  int pitch;
  int begin, chunks;  // first column; chunks of eight
  int token, stride;
};

// Turns kTokens tokens of a slice, `chunks` <= 32 kChunks chunks of eight BF16 values each, into what the MMAs read; a
// warp together, all of it in registers: each step's latency is paid once for all tokens.
template <int kFormat, int kGroup, int kTokenTiles, int kTokens, int kChunks>
__device__ __forceinline__ void convert_tokens(const ProjectionParams& p, const SliceOfTokens& slice, int lane) {
  const bool normalized = p.square_sums != nullptr;
  int tokens[kTokens];
  uint4 packed[kTokens][kChunks];
  unsigned most[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    // What is missing is the first one again: the same values to the same places.
    tokens[i] = slice.token + i * slice.stride < p.tokens ? slice.token + i * slice.stride : slice.token;
    most[i] = 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int chunk = lane + 32 * c;
      packed[i][c] = make_uint4(0, 0, 0, 0);
      if (chunk < slice.chunks)
        packed[i][c] = *reinterpret_cast<const uint4*>(slice.x + tokens[i] * slice.pitch + 16 * chunk);
    }
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (32 * c >= slice.chunks) break;
    if (normalized) {
      float gain[8] = {1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f};
      if (p.gain != nullptr && lane + 32 * c < slice.chunks) load_gain(p, slice.begin + 8 * (lane + 32 * c), gain);
#pragma unroll
      for (int i = 0; i < kTokens; ++i) packed[i][c] = normalize(packed[i][c], slice.row_factors[tokens[i]], gain);
    }
#pragma unroll
    for (int i = 0; i < kTokens; ++i) most[i] = max(most[i], largest_magnitude(packed[i][c]));
  }
  float factor[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    factor[i] = kFormat == FUT_BF16 ? 1.f : fp16_factor(__uint_as_float(__reduce_max_sync(0xffffffffu, most[i])));
    if (lane == 0) slice.factors[tokens[i]] = 1.f / factor[i];
  }
  if (kFormat == FUT_BF16 && !normalized) return;
  __syncwarp();  // all lanes have read before any of them writes
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (32 * c >= slice.chunks) break;
    const int chunk = lane + 32 * c;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      uint8_t* const row = slice.x + tokens[i] * slice.pitch;
      if constexpr (kFormat == FUT_BF16) {
        if (chunk < slice.chunks) *reinterpret_cast<uint4*>(row + 16 * chunk) = packed[i][c];
      } else {
        place_chunk<kFormat, kGroup, kTokenTiles>(packed[i][c], factor[i], row, slice.corrections + tokens[i], chunk,
                                                  chunk < slice.chunks);
      }
    }
  }
}

// The same for one token with a slice of any length, in two passes over shared memory.
template <int kFormat, int kGroup, int kTokenTiles>
__device__ __forceinline__ void convert_long_slice(const ProjectionParams& p, const SliceOfTokens& slice, int lane) {
  constexpr int kAtOnce = 2;
  uint8_t* const row = slice.x + slice.token * slice.pitch;
  const auto load = [&](int first, uint4(&packed)[kAtOnce]) {
#pragma unroll
    for (int c = 0; c < kAtOnce; ++c) {
      const int chunk = first + 32 * c + lane;
      packed[c] = make_uint4(0, 0, 0, 0);
      if (chunk < slice.chunks) packed[c] = *reinterpret_cast<const uint4*>(row + 16 * chunk);
    }
  };
  unsigned most = 0;
  for (int first = 0; first < slice.chunks; first += 32 * kAtOnce) {
    uint4 packed[kAtOnce];
    load(first, packed);
#pragma unroll
    for (int c = 0; c < kAtOnce; ++c) {
      const int chunk = first + 32 * c + lane;
      if (p.square_sums != nullptr && chunk < slice.chunks) {
        float gain[8] = {1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f};
        if (p.gain != nullptr) load_gain(p, slice.begin + 8 * chunk, gain);
        packed[c] = normalize(packed[c], slice.row_factors[slice.token], gain);
        *reinterpret_cast<uint4*>(row + 16 * chunk) = packed[c];
      }
      most = max(most, largest_magnitude(packed[c]));
    }
  }
  const float factor = kFormat == FUT_BF16 ? 1.f : fp16_factor(__uint_as_float(__reduce_max_sync(0xffffffffu, most)));
  if (lane == 0) slice.factors[slice.token] = 1.f / factor;
  if constexpr (kFormat != FUT_BF16) {
    for (int first = 0; first < slice.chunks; first += 32 * kAtOnce) {
      uint4 packed[kAtOnce];
      load(first, packed);
      __syncwarp();
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        const int chunk = first + 32 * c + lane;
        place_chunk<kFormat, kGroup, kTokenTiles>(packed[c], factor, row, slice.corrections + slice.token, chunk,
                                                  chunk < slice.chunks);
      }
    }
  }
}

// Turns a warp's tokens into what the MMAs read, from `slice.token` on.
template <int kFormat, int kGroup, int kTokenTiles>
__device__ __forceinline__ void convert_slice(const ProjectionParams& p, SliceOfTokens slice, int lane) {
  constexpr int kShortChunks = 64;
  constexpr int kAtOnce = 2;
  if (slice.chunks > kShortChunks) {
    for (; slice.token < p.tokens; slice.token += slice.stride)
      convert_long_slice<kFormat, kGroup, kTokenTiles>(p, slice, lane);
  } else if (slice.token + slice.stride >= p.tokens) {
    if (slice.token < p.tokens) convert_tokens<kFormat, kGroup, kTokenTiles, 1, kShortChunks / 32>(p, slice, lane);
  } else {
    for (; slice.token < p.tokens; slice.token += kAtOnce * slice.stride)
      convert_tokens<kFormat, kGroup, kTokenTiles, kAtOnce, kShortChunks / 32>(p, slice, lane);
  }
}

}  // namespace fut
