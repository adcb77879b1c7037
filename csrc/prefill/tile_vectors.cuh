// Factors of a tile's rows and columns, fetched by warps of their own while the tile is multiplied.

#pragma once

#include "../fut.h"
#include "gemm_params.h"

namespace fut {

template <int kTileN>
struct TileVectors {
  float row_factor[kGemmTileM];
  float out_inverse[kGemmTileM];  // 1 / scale of the E4M3 output
  int32_t request[kGemmTileM];
  int32_t position[kGemmTileM];
  int32_t page[kGemmTileM];
  float channel_scale[kTileN];
  float bias[kTileN];
};

// Warps that fetch: the first ones rows, the last columns.
inline constexpr int kRowVectorWarps = 2, kVectorWarps = kRowVectorWarps + 1;
// Rows of a lane, all fetched at once: what limits is latency, and a tile of 4096 columns of K leaves time for some
// twenty loads after each other.
inline constexpr int kLaneRows = kGemmTileM / (32 * kRowVectorWarps);

// Sums the `count` parts of each row in their order. Null pointers are rows that are not there.
__device__ __forceinline__ void sum_parts(const float* const (&parts)[kLaneRows], int count, float (&sum)[kLaneRows]) {
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) sum[i] = 0.f;
  int part = 0;
  if (count % 4 == 0 && reinterpret_cast<uintptr_t>(parts[0]) % 16 == 0) {
#pragma unroll 2
    for (; part < count; part += 4) {
      float4 four[kLaneRows] = {};
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i)
        if (parts[i] != nullptr) four[i] = *reinterpret_cast<const float4*>(parts[i] + part);
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) sum[i] = sum[i] + four[i].x + four[i].y + four[i].z + four[i].w;
    }
    return;
  }
#pragma unroll 4
  for (; part < count; ++part) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i)
      if (parts[i] != nullptr) sum[i] += parts[i][part];
  }
}

// The rows of warp `warp`. Those outside of the matrix get zeros.
template <int kTileN>
__device__ __forceinline__ void fetch_row_vectors(TileVectors<kTileN>& tile, const GemmScales& scales, int row0,
                                                  int rows, int warp, int lane) {
  const int first = warp * 32 + lane;
  const auto place = [&](int i) { return first + i * (32 * kRowVectorWarps); };
  bool inside[kLaneRows];
  int request[kLaneRows] = {};
  float factor[kLaneRows];
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) {
    const int64_t row = row0 + place(i);
    inside[i] = row < rows;
    if (inside[i] && scales.row_request != nullptr) request[i] = scales.row_request[row];
    factor[i] = !inside[i] ? 0.f : scales.row_factor != nullptr ? scales.row_factor[row] : 1.f;
  }
  if (scales.tokens.position != nullptr) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      if (!inside[i]) continue;
      const int64_t row = row0 + place(i);
      const int position = scales.tokens.position[row];
      const int64_t table_row = static_cast<int64_t>(scales.tokens.slot[row]) * scales.tokens.table_width;
      tile.position[place(i)] = position;
      tile.page[place(i)] = scales.tokens.page_table[table_row + position / FUT_PAGE_TOKENS];
    }
  }
  if (scales.square_sums != nullptr) {
    const float* parts[kLaneRows];
    float sum[kLaneRows];
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i)
      parts[i] = inside[i] ? scales.square_sums + static_cast<int64_t>(row0 + place(i)) * scales.square_parts : nullptr;
    sum_parts(parts, scales.square_parts, sum);
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) factor[i] *= rsqrtf(sum[i] * scales.inverse_columns + scales.eps);
  }
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) {
    if (inside[i] && scales.a_scale != nullptr) factor[i] *= scales.a_scale[request[i]];
    const bool quantized = inside[i] && scales.out_scale != nullptr;
    tile.row_factor[place(i)] = factor[i];
    tile.out_inverse[place(i)] = quantized ? __frcp_rn(scales.out_scale[request[i]]) : 0.f;
    tile.request[place(i)] = request[i];
  }
}

// One warp. Columns outside of the matrix get zeros.
template <int kTileN>
__device__ __forceinline__ void fetch_column_vectors(TileVectors<kTileN>& tile, const GemmScales& scales, int column0,
                                                     int columns, int lane) {
#pragma unroll 4
  for (int c = lane; c < kTileN; c += 32) {
    const int column = column0 + c;
    const bool inside = column < columns;
    tile.channel_scale[c] = !inside ? 0.f : scales.channel_scale == nullptr ? 1.f : scales.channel_scale[column];
    tile.bias[c] = inside && scales.bias != nullptr ? scales.bias[column] : 0.f;
  }
}

}  // namespace fut
