// From the slices' partial sums of a round of rows to what the product stores: scales, bias, and the epilogue.

#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "../fut.h"
#include "../ptx/bulk_copy.cuh"
#include "projection_params.cuh"

namespace fut {

__device__ __forceinline__ float silu(float v) { return v / (1.f + expf(-v)); }

// Rows `g` and `g + 8` of a row tile for two neighbouring tokens: the order of an MMA's accumulator in a lane.
struct Quad {
  int tile, row, token;  // row g
  float value[4];        // (g, token), (g, token + 1), (g + 8, token), (g + 8, token + 1)
};

__device__ __forceinline__ bool exists(const ProjectionParams& p, const Quad& quad, int i) {
  return quad.token + (i & 1) < p.tokens && quad.row + 4 * (i & 2) < p.rows;
}

__device__ __forceinline__ int64_t y_index(const ProjectionParams& p, const Quad& quad, int i) {
  return static_cast<int64_t>(quad.token + (i & 1)) * p.rows + quad.row + 4 * (i & 2);
}

__device__ __forceinline__ void store_residual(const ProjectionParams& p, const Quad& quad, const float (&before)[4],
                                               int lane) {
  __nv_bfloat16* h = static_cast<__nv_bfloat16*>(p.y);
  float squares[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (!exists(p, quad, i)) continue;
    const __nv_bfloat16 rounded = __float2bfloat16(before[i] + quad.value[i]);
    h[y_index(p, quad, i)] = rounded;
    squares[i & 1] += __bfloat162float(rounded) * __bfloat162float(rounded);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
      squares[i] += __shfl_xor_sync(0xffffffffu, squares[i], distance);
    if (lane < 4 && quad.token + i < p.tokens)
      p.y_square_sums[static_cast<int64_t>(quad.token + i) * p.tiles + quad.tile] = squares[i];
  }
}

__device__ __forceinline__ void store_swiglu(const ProjectionParams& p, const Quad& quad, int lane) {
  const int channels = p.rows / 2;
  __nv_bfloat16* y = static_cast<__nv_bfloat16*>(p.y) + static_cast<int64_t>(quad.token) * channels;
  if (p.row_order == FUT_INTERLEAVE8) {
    const int channel = quad.tile * 8 + (lane >> 2);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (channel < channels && quad.token + i < p.tokens)
        y[static_cast<int64_t>(i) * channels + channel] = __float2bfloat16(silu(quad.value[i]) * quad.value[i + 2]);
  } else {
    // Even rows are gates; their ups stand four lanes further.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float up = __shfl_down_sync(0xffffffffu, quad.value[i], 4);
      if ((lane & 4) == 0 && exists(p, quad, i))
        y[static_cast<int64_t>(i & 1) * channels + (quad.row + 4 * (i & 2)) / 2] =
            __float2bfloat16(silu(quad.value[i]) * up);
    }
  }
}

// Finishes the rows of one round: sums the slices in their order and stores. One warp; `slot` holds the partial sums.
template <int kTokenTiles, int kRowTiles>
__device__ __forceinline__ void finish_round(const ProjectionParams& p, const float* slot, uint64_t* full,
                                             uint32_t parity, int first_tile, int tiles, int lane) {
  constexpr int kQuads = kTokenTiles * kRowTiles;
  constexpr bool kAhead = kQuads <= 2;  // the residual is loaded while the sums are awaited
  const auto quad_of = [&](int q) {
    const int tile = first_tile + q / kTokenTiles;
    return Quad{tile, tile * kTileRows + (lane >> 2), q % kTokenTiles * 8 + 2 * (lane & 3), {0.f, 0.f, 0.f, 0.f}};
  };
  float before[kAhead ? kQuads : 1][4];
  const auto load_residual = [&](int q, float (&to)[4]) {
    const Quad quad = quad_of(q);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      to[i] = exists(p, quad, i) ? __bfloat162float(static_cast<const __nv_bfloat16*>(p.y)[y_index(p, quad, i)]) : 0.f;
  };
  if (kAhead && p.epilogue == FUT_RESIDUAL) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) load_residual(q, before[kAhead ? q : 0]);
  }
  barrier_wait(full, parity);
#pragma unroll(kAhead ? kQuads : 1)
  for (int q = 0; q < kQuads; ++q) {
    if (q / kTokenTiles >= tiles) break;
    Quad quad = quad_of(q);
    if (!kAhead && p.epilogue == FUT_RESIDUAL) load_residual(q, before[0]);
    const float* from = slot + q * kLanes * 4 + lane * 4;
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      const float4 part = *reinterpret_cast<const float4*>(from + s * kQuads * kLanes * 4);
      quad.value[0] += part.x;
      quad.value[1] += part.y;
      quad.value[2] += part.z;
      quad.value[3] += part.w;
    }
    if (p.channel_scale != nullptr) {
      const float low = p.channel_scale[quad.row], high = p.channel_scale[quad.row + 8];
      quad.value[0] *= low, quad.value[1] *= low, quad.value[2] *= high, quad.value[3] *= high;
    }
    if (p.bias != nullptr) {
      const float low = quad.row < p.rows ? p.bias[quad.row] : 0.f,
                  high = quad.row + 8 < p.rows ? p.bias[quad.row + 8] : 0.f;
      quad.value[0] += low, quad.value[1] += low, quad.value[2] += high, quad.value[3] += high;
    }
    if (p.epilogue == FUT_STORE) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (exists(p, quad, i)) static_cast<float*>(p.y)[y_index(p, quad, i)] = quad.value[i];
    } else if (p.epilogue == FUT_RESIDUAL) {
      store_residual(p, quad, before[kAhead ? q : 0], lane);
    } else {
      store_swiglu(p, quad, lane);
    }
  }
}

}  // namespace fut
