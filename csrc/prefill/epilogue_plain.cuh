// The scaled product as it is, in BF16 or FP32.

#pragma once

#include "epilogue.cuh"

namespace fut {

struct StoreBf16 {
  struct Params {
    uint8_t* data;
    int64_t stride_bytes;
  };
  static constexpr int kHeadDim = 0;
  static constexpr int kPromotedTileN = 256;

  template <int kTileN>
  __device__ __forceinline__ static void store(const Params& p, float (&d)[kTileN / 2],
                                               const EpilogueTile<kTileN>& tile) {
#pragma unroll
    for (int group = 0; group < kTileN / 32; ++group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 v = tile.values(d, 4 * group + i, half);
          w[i] = pack_bf16(v.x, v.y);
        }
        quad_transpose(w, tile.lane);
        const int column = tile.column0 + 32 * group + 8 * (tile.lane & 3);
        if (tile.has_row(half))
          store_bytes(p.data + tile.row(half) * p.stride_bytes + 2 * column, w, 2 * (tile.columns - column));
      }
    }
  }
};

struct StoreF32 {
  using Params = StoreBf16::Params;
  static constexpr int kHeadDim = 0;
  static constexpr int kPromotedTileN = 256;

  template <int kTileN>
  __device__ __forceinline__ static void store(const Params& p, float (&d)[kTileN / 2],
                                               const EpilogueTile<kTileN>& tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!tile.has_row(half)) continue;
      float* row = reinterpret_cast<float*>(p.data + tile.row(half) * p.stride_bytes);
#pragma unroll
      for (int j = 0; j < kTileN / 8; ++j) {
        const float2 v = tile.values(d, j, half);
        const int column = tile.column0 + 8 * j + 2 * (tile.lane & 3);
        if (column + 1 < tile.columns)
          *reinterpret_cast<float2*>(row + column) = v;
        else if (column < tile.columns)
          row[column] = v.x;
      }
    }
  }
};

}  // namespace fut
