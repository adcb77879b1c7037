// One head in the registers of a warp: RMSNorm, RoPE, rotation and quantisation as docs/numerics.md rounds them.
//
// Lane l holds dims l, l + 32, ... `raw` is what the projection left in global memory, read from the L2: a kernel that
// started before the projection ended may have older lines in its L1. Products and sums that the reference rounds one
// by one are not contracted to FMA, so that the codes come out equal.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fut {

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

__device__ __forceinline__ float round_bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

template <int kDim>
struct HeadVector {
  static constexpr int kPerLane = (kDim + 31) / 32;
  float x[kPerLane];

  // Dims beyond the head are held as zero.
  __device__ __forceinline__ static bool has(int e, int lane) { return kDim % 32 == 0 || lane + 32 * e < kDim; }
};

// RMSNorm with `gain` [kDim] where it is not null.
template <int kDim>
__device__ __forceinline__ float head_norm_factor(const float* raw, float eps, int lane) {
  float squares = 0.0f;
#pragma unroll
  for (int e = 0; e < HeadVector<kDim>::kPerLane; ++e) {
    if (!HeadVector<kDim>::has(e, lane)) continue;
    const float x = __ldcg(raw + lane + 32 * e);
    squares += x * x;
  }
  return rsqrtf(__fdiv_rn(warp_sum(squares), static_cast<float>(kDim)) + eps);
}

// Normalises (where `gain` is not null) and turns by the tables [kDim / 2] of the token.
template <int kDim>
__device__ __forceinline__ HeadVector<kDim> turned_head(const float* raw, const float* gain, float eps,
                                                        const float* cosine, const float* sine, int lane) {
  constexpr int kHalf = kDim / 2;
  const float factor = gain != nullptr ? head_norm_factor<kDim>(raw, eps, lane) : 1.0f;
  HeadVector<kDim> head;
#pragma unroll
  for (int e = 0; e < HeadVector<kDim>::kPerLane; ++e) {
    const int dim = lane + 32 * e;
    head.x[e] = 0.0f;
    if (!HeadVector<kDim>::has(e, lane)) continue;
    const bool low = dim < kHalf;
    const int partner = low ? dim + kHalf : dim - kHalf;
    float own = __ldcg(raw + dim);
    float other = __ldcg(raw + partner);
    if (gain != nullptr) {
      own = __fmul_rn(__fmul_rn(own, factor), gain[dim]);
      other = __fmul_rn(__fmul_rn(other, factor), gain[partner]);
    }
    const int angle = low ? dim : partner;
    const float along = __fmul_rn(own, cosine[angle]);
    const float across = __fmul_rn(other, sine[angle]);
    head.x[e] = low ? __fsub_rn(along, across) : __fadd_rn(along, across);
  }
  return head;
}

template <int kDim>
__device__ __forceinline__ HeadVector<kDim> plain_head(const float* raw, int lane) {
  HeadVector<kDim> head;
#pragma unroll
  for (int e = 0; e < HeadVector<kDim>::kPerLane; ++e) {
    head.x[e] = HeadVector<kDim>::has(e, lane) ? __ldcg(raw + lane + 32 * e) : 0.0f;
  }
  return head;
}

template <int kDim>
__device__ __forceinline__ void round_head(HeadVector<kDim>& head) {
#pragma unroll
  for (int e = 0; e < HeadVector<kDim>::kPerLane; ++e) head.x[e] = round_bf16(head.x[e]);
}

// Multiplies by the block-diagonal normalised Hadamard matrix; its own inverse.
template <int kDim>
__device__ __forceinline__ void rotate_head(HeadVector<kDim>& head, int lane) {
  constexpr int kBlock = kDim & -kDim;
  static_assert(kBlock >= 16 && kBlock <= 128, "blocks of 16 to 128");
  constexpr float kNorm = kBlock == 16   ? 0.25f
                          : kBlock == 32 ? 0.17677669529663687f
                          : kBlock == 64 ? 0.125f
                                         : 0.08838834764831845f;
#pragma unroll
  for (int step = 1; step < (kBlock < 32 ? kBlock : 32); step *= 2) {
#pragma unroll
    for (int e = 0; e < HeadVector<kDim>::kPerLane; ++e) {
      const float other = __shfl_xor_sync(~0u, head.x[e], step);
      head.x[e] = lane & step ? other - head.x[e] : other + head.x[e];
    }
  }
#pragma unroll
  for (int step = 1; step < kBlock / 32; step *= 2) {
#pragma unroll
    for (int e = 0; e < HeadVector<kDim>::kPerLane; ++e) {
      if ((e & step) == 0 && (e | step) < HeadVector<kDim>::kPerLane) {
        const float first = head.x[e];
        const float second = head.x[e | step];
        head.x[e] = first + second;
        head.x[e | step] = first - second;
      }
    }
  }
#pragma unroll
  for (int e = 0; e < HeadVector<kDim>::kPerLane; ++e) head.x[e] *= kNorm;
}

// 2^k with |largest| 2^k in [2^exponent, 2^(exponent + 1)).
__device__ __forceinline__ float power_of_two_factor(float largest, int exponent) {
  const int field = static_cast<int>(__float_as_uint(largest) >> 23 & 255u);
  return __uint_as_float(static_cast<uint32_t>(min(max(254 + exponent - field, 1), 253)) << 23);
}

// Writes the codes, 0..15, one a byte; returns scale (low half) and zero point (high half) in BF16. All lanes.
template <int kDim>
__device__ __forceinline__ uint32_t quantize_head(const HeadVector<kDim>& head, bool zero_point, uint8_t* codes,
                                                  int lane) {
  float low = head.x[0];
  float high = head.x[0];
#pragma unroll
  for (int e = 1; e < HeadVector<kDim>::kPerLane; ++e) {
    if (HeadVector<kDim>::has(e, lane)) {
      low = fminf(low, head.x[e]);
      high = fmaxf(high, head.x[e]);
    }
  }
  low = -warp_max(-low);
  high = warp_max(high);
  float zero = round_bf16(low);
  const float span = zero_point ? fmaxf(__fsub_rn(high, zero), 0.0f) : fmaxf(-low, high);
  float scale = round_bf16(__fdiv_rn(span, zero_point ? 15.0f : 7.0f));
  if (!(scale > 0.0f)) scale = 1.0f;
  if (!zero_point) zero = -8.0f * scale;
#pragma unroll
  for (int e = 0; e < HeadVector<kDim>::kPerLane; ++e) {
    if (!HeadVector<kDim>::has(e, lane)) continue;
    const float code = rintf(__fdiv_rn(__fsub_rn(head.x[e], zero), scale));
    codes[lane + 32 * e] = static_cast<uint8_t>(fminf(fmaxf(code, 0.0f), 15.0f));
  }
  return __float_as_uint(zero) & 0xffff0000u | __float_as_uint(scale) >> 16;
}

}  // namespace fut
