// h + product: the new residual stream in BF16, a copy of it in E4M3 for the next product, and the sums of its squares
// for the next norm, one for each row and kSquareColumns columns.

#pragma once

#include "epilogue.cuh"

namespace fut {

struct AddResidual {
  using Params = ResidualParams;
  static constexpr int kHeadDim = 0;
  static constexpr int kPromotedTileN = 128;

  // What 64 columns of one of a lane's rows hold before: [32 columns][word].
  using Before = uint32_t[2][4];

  template <int kTileN>
  __device__ __forceinline__ static void load(const Params& p, const EpilogueTile<kTileN>& tile, int block, int half,
                                              Before& before) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int column = tile.column0 + 64 * block + 32 * part + 8 * (tile.lane & 3);
      const int bytes = tile.has_row(half) ? 2 * (tile.columns - column) : 0;
      load_bytes(p.residual + tile.row(half) * p.residual_stride_bytes + 2 * column, before[part], bytes);
    }
  }

  template <int kTileN>
  __device__ __forceinline__ static void store(const Params& p, float (&d)[kTileN / 2],
                                               const EpilogueTile<kTileN>& tile) {
    QuantizedRecord record;
    float squares[2] = {0.f, 0.f};
    Before before[2];
    load(p, tile, 0, 0, before[0]);
    load(p, tile, 0, 1, before[1]);
#pragma unroll
    for (int block = 0; block < kTileN / 64; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        add(p, d, tile, block, half, before[half], record, squares[half]);
        if (block + 1 < kTileN / 64) load(p, tile, block + 1, half, before[half]);
      }
      if (block % 2 == 1 && p.square_sums != nullptr) store_squares(p, tile, block / 2, squares);
    }
    if (p.quantized.data != nullptr) record.publish(p.quantized, tile);
  }

  // 64 columns of one row.
  template <int kTileN>
  __device__ __forceinline__ static void add(const Params& p, const float (&d)[kTileN / 2],
                                             const EpilogueTile<kTileN>& tile, int block, int half, Before& before,
                                             QuantizedRecord& record, float& squares) {
    const float inverse = tile.vectors.out_inverse[tile.upper + 8 * half];
    uint32_t e4m3[4];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t (&w)[4] = before[part];
      quad_transpose(w, tile.lane);
      float x[8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 v = tile.values(d, 8 * block + 4 * part + i, half);
        w[i] = pack_bf16(low_bf16(w[i]) + v.x, high_bf16(w[i]) + v.y);
        x[2 * i] = low_bf16(w[i]);
        x[2 * i + 1] = high_bf16(w[i]);
        squares += x[2 * i] * x[2 * i] + x[2 * i + 1] * x[2 * i + 1];
      }
      record.note(x, inverse, half);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        e4m3[2 * part + i] = pack_e4m3(x[4 * i] * inverse, x[4 * i + 1] * inverse) |
                             pack_e4m3(x[4 * i + 2] * inverse, x[4 * i + 3] * inverse) << 16;
      quad_transpose(w, tile.lane);
      const int column = tile.column0 + 64 * block + 32 * part + 8 * (tile.lane & 3);
      if (tile.has_row(half))
        store_bytes(p.out + tile.row(half) * p.out_stride_bytes + 2 * column, w, 2 * (tile.columns - column));
    }
    if (p.quantized.data == nullptr) return;
    // Lane q held columns 8 j + 2 q and the next of eight j, two j a word; now this lane has two j of all four lanes.
    quad_transpose(e4m3, tile.lane);
    const uint32_t w[4] = {__byte_perm(e4m3[0], e4m3[1], 0x5410), __byte_perm(e4m3[2], e4m3[3], 0x5410),
                           __byte_perm(e4m3[0], e4m3[1], 0x7632), __byte_perm(e4m3[2], e4m3[3], 0x7632)};
    const int column = tile.column0 + 64 * block + 16 * (tile.lane & 3);
    if (tile.has_row(half))
      store_bytes(p.quantized.data + tile.row(half) * p.quantized.stride + column, w, tile.columns - column);
  }

  template <int kTileN>
  __device__ __forceinline__ static void store_squares(const Params& p, const EpilogueTile<kTileN>& tile, int part,
                                                       float (&squares)[2]) {
    const int place = tile.column0 / kSquareColumns + part;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = reduce_quad(squares[half], [](float a, float b) { return a + b; });
      if (tile.lane % 4 == 0 && tile.has_row(half) && place < p.square_parts)
        p.square_sums[static_cast<int64_t>(tile.row(half)) * p.square_parts + place] = sum;
      squares[half] = 0.f;
    }
  }
};

}  // namespace fut
