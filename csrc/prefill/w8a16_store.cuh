// From accumulators of channels by tokens to rows of tokens; and the sum over parts of K, always in the same order.

#pragma once

#include "../ptx/mma.cuh"
#include "../ptx/pack.cuh"
#include "../ptx/thread.cuh"
#include "quad.cuh"
#include "w8a16_fragment.cuh"
#include "w8a16_params.h"

namespace fut {

// Where a warp's 16 channels of a tile lie, and their factors.
struct W8a16Place {
  int channel0, token0, lane;
  float alpha[2], bias[2];  // of channels channel0 + lane / 4 and 8 further
};

struct OutF32 {};

__device__ __forceinline__ uint32_t pack_output(Bf16, float low, float high) { return pack_bf16(low, high); }
__device__ __forceinline__ uint32_t pack_output(Fp16, float low, float high) { return pack_fp16(low, high); }

__device__ __forceinline__ float scaled(const W8a16Place& place, float sum, int half) {
  return sum * place.alpha[half] + place.bias[half];
}

template <int kTokens, class Out>
__device__ __forceinline__ void store_16_bit_tokens(Out, const float (&d)[kTokens / 2], const W8a16Params& p,
                                                    const W8a16Place& place) {
#pragma unroll
  for (int j = 0; j < kTokens / 8; j += 2) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i & 1, at = 4 * (j + i / 2) + 2 * half;
      w[i] = transpose_8x8(pack_output(Out{}, scaled(place, d[at], half), scaled(place, d[at + 1], half)));
    }
    quad_transpose(w, place.lane);
    const int token = place.token0 + 8 * (j + (place.lane & 3) / 2) + place.lane / 4;
    const int channel = place.channel0 + 8 * (place.lane & 1);
    if (token < p.m) store_bytes(p.out + token * p.out_stride_bytes + 2 * channel, w, 2 * (p.n - channel));
  }
}

template <int kTokens>
__device__ __forceinline__ void store_f32_tokens(const float (&d)[kTokens / 2], const W8a16Params& p,
                                                 const W8a16Place& place) {
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) {
    const int half = i >> 1 & 1;
    const int token = place.token0 + 8 * (i / 4) + 2 * (place.lane & 3) + (i & 1);
    const int channel = place.channel0 + place.lane / 4 + 8 * half;
    if (token < p.m && channel < p.n)
      reinterpret_cast<float*>(p.out + token * p.out_stride_bytes)[channel] = scaled(place, d[i], half);
  }
}

// Adds up all splits' sums of 64 channels in the warpgroup that comes last; true there. The others only leave theirs.
// `part`: which of all tiles' 64 channels. `arrived`: in shared memory, the warpgroup's own.
template <int kTokens>
__device__ __forceinline__ bool merge_splits(float (&d)[kTokens / 2], const W8a16Params& p, int64_t part, int64_t parts,
                                             int split, int warpgroup, uint32_t* arrived) {
  constexpr int kWords = kTokens / 8;  // of four floats a thread
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const auto place = [&](int of_split, int word) {
    return reinterpret_cast<float4*>(p.partial) + ((of_split * parts + part) * kWords + word) * 128 + thread;
  };
#pragma unroll
  for (int word = 0; word < kWords; ++word)
    *place(split, word) = make_float4(d[4 * word], d[4 * word + 1], d[4 * word + 2], d[4 * word + 3]);
  named_barrier<128>(1 + warpgroup);
  if (thread == 0) {
    uint32_t* counter = &p.counters[part];
    *arrived = arrive(counter, 1);
    if (*arrived + 1 == static_cast<uint32_t>(p.splits)) *counter = 0;
  }
  named_barrier<128>(1 + warpgroup);
  if (*arrived + 1 != static_cast<uint32_t>(p.splits)) return false;
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) d[i] = 0.f;
#pragma unroll 1
  for (int s = 0; s < p.splits; ++s) {
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const float4 sums = __ldcg(place(s, word));
      d[4 * word] += sums.x;
      d[4 * word + 1] += sums.y;
      d[4 * word + 2] += sums.z;
      d[4 * word + 3] += sums.w;
    }
  }
  return true;
}

}  // namespace fut
