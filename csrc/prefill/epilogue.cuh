// What all epilogues share: where a warp's part of a tile lies, its scaled values, and what is recorded about E4M3
// outputs.
//
// An epilogue is a struct with `Params`; `store<kTileN>(params, accumulators, tile)`, which every consumer warp calls
// with its share of the tile; `kHeadDim`, if tiles must hold whole heads; and `kPromotedTileN`, the widest tile for
// which it has registers beside promoted sums. An epilogue writes nothing outside of the matrix.

#pragma once

#include "../ptx/pack.cuh"
#include "../ptx/thread.cuh"
#include "quad.cuh"
#include "tile_vectors.cuh"

namespace fut {

template <int kTileN>
struct EpilogueTile {
  const TileVectors<kTileN>& vectors;
  int rows, columns;  // sizes of the matrix, or where this tile's columns end
  int row0, column0;  // first of the tile
  int upper;          // this lane's rows in the tile: upper and upper + 8
  int lane;

  __device__ __forceinline__ int row(int half) const { return row0 + upper + 8 * half; }
  __device__ __forceinline__ bool has_row(int half) const { return row(half) < rows; }
  // Columns 8 j + 2 (lane % 4) and the next of a row, after scales and bias.
  __device__ __forceinline__ float2 values(const float (&d)[kTileN / 2], int j, int half) const {
    const float factor = vectors.row_factor[upper + 8 * half];
    const int column = 8 * j + 2 * (lane & 3);
    const float2 scale = *reinterpret_cast<const float2*>(&vectors.channel_scale[column]);
    const float2 bias = *reinterpret_cast<const float2*>(&vectors.bias[column]);
    return {d[4 * j + 2 * half] * factor * scale.x + bias.x, d[4 * j + 2 * half + 1] * factor * scale.y + bias.y};
  }
};

inline constexpr float kE4m3Max = 448.f;

// Largest magnitude (NaN where there is one, so that it is seen) of each of a lane's two rows, and how many of their
// elements saturate.
struct QuantizedRecord {
  float amax[2] = {0.f, 0.f};
  uint32_t saturated = 0;

  template <int kCount>
  __device__ __forceinline__ void note(const float (&x)[kCount], float inverse, int half) {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) most = max_with_nan(most, fabsf(x[i]));
    if (!(most * inverse <= kE4m3Max)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) saturated += fabsf(x[i] * inverse) > kE4m3Max;
    }
    amax[half] = max_with_nan(amax[half], most);
  }

  template <int kCount>
  __device__ __forceinline__ void note(const float2 (&pairs)[kCount], float inverse, int half) {
    float x[2 * kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[2 * i] = pairs[i].x, x[2 * i + 1] = pairs[i].y;
    note(x, inverse, half);
  }

  template <int kTileN>
  __device__ __forceinline__ void publish(const QuantizedOut& out, const EpilogueTile<kTileN>& tile) {
    const auto larger = [](uint32_t a, uint32_t b) { return a > b ? a : b; };
    uint32_t bits[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      bits[half] = reduce_quad(tile.has_row(half) ? __float_as_uint(amax[half]) : 0u, larger);
    if (out.amax != nullptr) {
      const int first = tile.vectors.request[tile.upper], second = tile.vectors.request[tile.upper + 8];
      const int common = __shfl_sync(~0u, first, 0);
      const uint32_t most = __reduce_max_sync(~0u, larger(bits[0], bits[1]));
      if (__all_sync(~0u, first == common && (second == common || !tile.has_row(1)))) {
        if (tile.lane == 0) atomicMax(&out.amax[common], most);
      } else if (tile.lane % 4 == 0) {
        if (tile.has_row(0)) atomicMax(&out.amax[first], bits[0]);
        if (tile.has_row(1)) atomicMax(&out.amax[second], bits[1]);
      }
    }
    publish_count(out, tile.lane);
  }

  // The same where all of a warp's rows belong to one request; rows that are not there have noted nothing.
  __device__ __forceinline__ void publish(const QuantizedOut& out, int request, int lane) {
    const uint32_t upper = __float_as_uint(amax[0]), lower = __float_as_uint(amax[1]);
    const uint32_t most = __reduce_max_sync(~0u, upper > lower ? upper : lower);
    if (out.amax != nullptr && lane == 0) atomicMax(&out.amax[request], most);
    publish_count(out, lane);
  }

  __device__ __forceinline__ void publish_count(const QuantizedOut& out, int lane) {
    if (out.saturated == nullptr) return;
    const uint32_t count = __reduce_add_sync(~0u, saturated);
    if (lane == 0 && count != 0) atomicAdd(out.saturated, static_cast<unsigned long long>(count));
  }
};

}  // namespace fut
