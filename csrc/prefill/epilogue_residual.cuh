// h + product: the new residual stream in BF16, a copy of it in E4M3 for the next product, and the sums of its squares
// for the next norm, one for each row and kSquareColumns columns.

#pragma once

#include "../ptx/global_load.cuh"
#include "epilogue.cuh"

namespace fut {

struct AddResidual {
  using Params = ResidualParams;
  static constexpr int kHeadDim = 0;
  static constexpr int kPromotedTileN = 128;

  // What 64 columns of one of a lane's rows hold before: [32 columns][word].
  using Before = uint32_t[2][4];
  // Pieces of 64 columns of a row that are loaded ahead of the one that is finished: as many as there are registers
  // for. Nothing else hides the loads' latency, and the compiler moves none of them over a store.
  static constexpr int kAhead = 2;

  // `kWhole`: all of the tile's columns are there.
  template <bool kWhole, int kTileN>
  __device__ __forceinline__ static void load(const Params& p, const EpilogueTile<kTileN>& tile, int block, int half,
                                              Before& before) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int column = tile.column0 + 64 * block + 32 * part + 8 * (tile.lane & 3);
      const uint8_t* from = p.residual + tile.row(half) * p.residual_stride_bytes + 2 * column;
      if constexpr (kWhole)
        load_if(from, before[part], tile.has_row(half));
      else
        load_bytes(from, before[part], tile.has_row(half) ? 2 * (tile.columns - column) : 0);
    }
  }

  template <int kTileN>
  __device__ __forceinline__ static void store(const Params& p, float (&d)[kTileN / 2],
                                               const EpilogueTile<kTileN>& tile) {
    if (tile.columns - tile.column0 >= kTileN)
      store_tile<true, kTileN>(p, d, tile);
    else
      store_tile<false, kTileN>(p, d, tile);
  }

  template <bool kWhole, int kTileN>
  __device__ __forceinline__ static void store_tile(const Params& p, const float (&d)[kTileN / 2],
                                                    const EpilogueTile<kTileN>& tile) {
    constexpr int kPieces = kTileN / 32;  // two rows of 64 columns each
    QuantizedRecord record;
    float squares[2] = {0.f, 0.f};
    Before before[kAhead + 1];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load<kWhole, kTileN>(p, tile, i / 2, i % 2, before[i]);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (i + kAhead < kPieces)
        load<kWhole, kTileN>(p, tile, (i + kAhead) / 2, i + kAhead & 1, before[(i + kAhead) % (kAhead + 1)]);
      add<kWhole, kTileN>(p, d, tile, i / 2, i % 2, before[i % (kAhead + 1)], record, squares[i % 2]);
      if (i % 4 == 3 && p.square_sums != nullptr) store_squares(p, tile, i / 4, squares);
    }
    if (p.quantized.data != nullptr) record.publish(p.quantized, tile);
  }

  // 64 columns of one row.
  template <bool kWhole, int kTileN>
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
        store_bytes(p.out + tile.row(half) * p.out_stride_bytes + 2 * column, w,
                    kWhole ? 16 : 2 * (tile.columns - column));
    }
    if (p.quantized.data == nullptr) return;
    // Lane q held columns 8 j + 2 q and the next of eight j, two j a word; now this lane has two j of all four lanes.
    quad_transpose(e4m3, tile.lane);
    const uint32_t w[4] = {__byte_perm(e4m3[0], e4m3[1], 0x5410), __byte_perm(e4m3[2], e4m3[3], 0x5410),
                           __byte_perm(e4m3[0], e4m3[1], 0x7632), __byte_perm(e4m3[2], e4m3[3], 0x7632)};
    const int column = tile.column0 + 64 * block + 16 * (tile.lane & 3);
    if (tile.has_row(half))
      store_bytes(p.quantized.data + tile.row(half) * p.quantized.stride + column, w,
                  kWhole ? 16 : tile.columns - column);
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
