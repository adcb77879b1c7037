// Merging the sums of parts of a context, in their order.

#pragma once

#include "attention_unit.cuh"
#include "head_vector.cuh"

namespace fut {

// Parts that the warps of a CTA left in shared memory.
template <int kDim>
struct SharedPartials {
  const float* out;
  int out_stride;
  const float2* sums;
  int sums_stride;

  __device__ __forceinline__ float2 sum(int part) const { return sums[part * sums_stride]; }
  __device__ __forceinline__ float value(int part, int dim) const { return out[part * out_stride + dim]; }
};

// Parts that CTAs left in the workspace: read from the L2, where the others' writes are.
template <int kDim>
struct GlobalPartials {
  const float* out;
  const float2* sums;

  __device__ __forceinline__ float2 sum(int part) const { return __ldcg(sums + part); }
  __device__ __forceinline__ float value(int part, int dim) const { return __ldcg(out + int64_t{part} * kDim + dim); }
};

template <int kDim>
struct MergedHead {
  HeadVector<kDim> out;
  float top;
  float total;
};

// All lanes of a warp, one head. A part without tokens has maximum -infinity.
template <int kDim, class Partials>
__device__ __forceinline__ MergedHead<kDim> merge_head(const Partials& partials, int parts, int lane) {
  MergedHead<kDim> merged{};
  merged.top = -INFINITY;
  for (int first = 0; first < parts; first += 32) {
    const int here = min(parts - first, 32);
    const float2 sum = lane < here ? partials.sum(first + lane) : make_float2(-INFINITY, 0.0f);
    const float top = fmaxf(merged.top, warp_max(sum.x));
    const float before = exp2_fast(merged.top - top);
    const float factor = exp2_fast(sum.x - top);
    merged.top = top;
    merged.total = merged.total * before + warp_sum(sum.y * factor);
#pragma unroll
    for (int e = 0; e < HeadVector<kDim>::kPerLane; ++e) merged.out.x[e] *= before;
#pragma unroll 8
    for (int part = 0; part < here; ++part) {
      const float share = __shfl_sync(~0u, factor, part);
#pragma unroll
      for (int e = 0; e < HeadVector<kDim>::kPerLane; ++e) {
        if (HeadVector<kDim>::has(e, lane)) {
          merged.out.x[e] = fmaf(share, partials.value(first + part, lane + 32 * e), merged.out.x[e]);
        }
      }
    }
  }
  return merged;
}

}  // namespace fut
