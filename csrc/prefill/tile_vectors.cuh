// Factors of a tile's rows and columns, fetched by a warp of their own while the tile is multiplied.

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

// One warp. Rows and columns outside of the matrix get zeros.
template <int kTileN>
__device__ __forceinline__ void fetch_tile_vectors(TileVectors<kTileN>& tile, const GemmScales& scales, int row0,
                                                   int rows, int column0, int columns, int lane) {
#pragma unroll 1
  for (int r = lane; r < kGemmTileM; r += 32) {
    const int64_t row = row0 + r;
    float factor = 0.f, inverse = 0.f;
    int request = 0;
    if (row < rows) {
      if (scales.row_request != nullptr) request = scales.row_request[row];
      factor = scales.row_factor != nullptr ? scales.row_factor[row] : 1.f;
      if (scales.square_sums != nullptr) {
        const float* parts = scales.square_sums + row * scales.square_parts;
        float sum = 0.f;
#pragma unroll 2
        for (int i = 0; i < scales.square_parts; ++i) sum += parts[i];
        factor *= rsqrtf(sum * scales.inverse_columns + scales.eps);
      }
      if (scales.a_scale != nullptr) factor *= scales.a_scale[request];
      if (scales.out_scale != nullptr) inverse = __frcp_rn(scales.out_scale[request]);
    }
    tile.row_factor[r] = factor;
    tile.out_inverse[r] = inverse;
    tile.request[r] = request;
    if (scales.tokens.position != nullptr && row < rows) {
      const int position = scales.tokens.position[row];
      const int64_t table_row = static_cast<int64_t>(scales.tokens.slot[row]) * scales.tokens.table_width;
      tile.position[r] = position;
      tile.page[r] = scales.tokens.page_table[table_row + position / FUT_PAGE_TOKENS];
    }
  }
#pragma unroll 2
  for (int c = lane; c < kTileN; c += 32) {
    const int column = column0 + c;
    const bool inside = column < columns;
    tile.channel_scale[c] = !inside ? 0.f : scales.channel_scale == nullptr ? 1.f : scales.channel_scale[column];
    tile.bias[c] = inside && scales.bias != nullptr ? scales.bias[column] : 0.f;
  }
}

}  // namespace fut
