// One chunk of weights times the tokens: mma.sync.m16n8k16 with the weights on its A operand.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../fut.h"
#include "../ptx/mma.cuh"
#include "projection_params.cuh"

namespace fut {

template <int kTokenTiles>
using Accumulator = float[kTokenTiles][4];

// A group's products begin with what the offsets of the codes will add, taken out: the sums that the tensor cores round
// on the way are the smaller for it, about as large as what is still to come.
template <int kTokenTiles, int kRowTiles>
__device__ __forceinline__ void begin_group(const float* corrections, Accumulator<kTokenTiles> (&group)[kRowTiles]) {
#pragma unroll
  for (int j = 0; j < kTokenTiles; ++j) {
    const float2 c = *reinterpret_cast<const float2*>(corrections + 8 * j);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      group[r][j][0] = group[r][j][2] = c.x;
      group[r][j][1] = group[r][j][3] = c.y;
    }
  }
}

// Scales a group's products and adds them to the slice's sum.
template <int kTokenTiles, int kRowTiles>
__device__ __forceinline__ void finish_group(const uint8_t* scales, int tile_stage, int scale_is_fp16,
                                             const Accumulator<kTokenTiles> (&group)[kRowTiles],
                                             Accumulator<kTokenTiles> (&sum)[kRowTiles]) {
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    const uint32_t stored = *reinterpret_cast<const uint32_t*>(scales + r * tile_stage);
    const float2 scale = scale_is_fp16
                             ? __half22float2(*reinterpret_cast<const __half2*>(&stored))
                             : make_float2(__uint_as_float(stored << 16), __uint_as_float(stored & 0xffff0000u));
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) {
      sum[r][j][0] = fmaf(scale.x, group[r][j][0], sum[r][j][0]);
      sum[r][j][1] = fmaf(scale.x, group[r][j][1], sum[r][j][1]);
      sum[r][j][2] = fmaf(scale.y, group[r][j][2], sum[r][j][2]);
      sum[r][j][3] = fmaf(scale.y, group[r][j][3], sum[r][j][3]);
    }
  }
}

// `kTiles` neighbouring k64 tiles of INT4, whole groups: codes as FP16 1024 + q and 1024 + 16 q go into two
// accumulators.
template <int kGroup, int kTiles, int kTokenTiles, int kRowTiles>
__device__ __forceinline__ void multiply_tiles(const uint8_t* codes, const uint8_t* scales, int scale_is_fp16,
                                               const uint8_t* x, const int (&x_row)[kTokenTiles],
                                               const float* corrections, int lane,
                                               Accumulator<kTokenTiles> (&sum)[kRowTiles]) {
  constexpr int kStage = int4_tile_stage(kGroup, kRowTiles);
  constexpr bool kOneGroup = kGroup >= kTiles * kTileCols;
  Accumulator<kTokenTiles> products[kRowTiles];
  if constexpr (kOneGroup) begin_group<kTokenTiles, kRowTiles>(corrections, products);
#pragma unroll(kTokenTiles == 4 && kOneGroup ? 1 : kTiles)
  for (int tile = 0; tile < kTiles; ++tile) {
    uint4 words[kRowTiles];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
      words[r] = *reinterpret_cast<const uint4*>(codes + r * kStage + tile * (kTileRows * 32) + lane * 16);
    // Groups of 32 begin and end within it, which takes registers.
#pragma unroll(kTokenTiles == 4 && kGroup < kTileCols ? 1 : 2)
    for (int pair = 0; pair < 2; ++pair) {
      const int group = (64 * tile + 32 * pair) / kGroup;
      if (!kOneGroup && (64 * tile + 32 * pair) % kGroup == 0)
        begin_group<kTokenTiles, kRowTiles>(corrections + group * (8 * kTokenTiles), products);
      uint4 b[kTokenTiles];
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j)
        b[j] = *reinterpret_cast<const uint4*>(x + x_row[j] + 128 * tile + 64 * pair);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        const uint32_t first = pair == 0 ? words[r].x : words[r].z, second = pair == 0 ? words[r].y : words[r].w;
        const uint32_t low = first >> kPairShift, high = second >> kPairShift;
        const uint32_t e0 = pick_bits<kPairMaskEven, kFp16Magic>(first), e1 = pick_bits<kPairMaskEven, kFp16Magic>(low);
        const uint32_t e2 = pick_bits<kPairMaskEven, kFp16Magic>(second),
                       e3 = pick_bits<kPairMaskEven, kFp16Magic>(high);
        const uint32_t o0 = pick_bits<kPairMaskOdd, kFp16Magic>(first), o1 = pick_bits<kPairMaskOdd, kFp16Magic>(low);
        const uint32_t o2 = pick_bits<kPairMaskOdd, kFp16Magic>(second), o3 = pick_bits<kPairMaskOdd, kFp16Magic>(high);
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) {
          mma_fp16(products[r][j], e0, e1, e2, e3, b[j].x, b[j].y);
          mma_fp16(products[r][j], o0, o1, o2, o3, b[j].z, b[j].w);
        }
      }
      if ((64 * tile + 32 * pair + 32) % kGroup == 0)
        finish_group<kTokenTiles, kRowTiles>(scales + group * (kTileRows * 2), kStage, scale_is_fp16, products, sum);
    }
  }
}

// A chunk of INT4, `width` columns from `column` of this block's activations on.
template <int kGroup, int kTokenTiles, int kRowTiles>
__device__ __forceinline__ void multiply_int4(const uint8_t* stage, int scale_is_fp16, const uint8_t* x,
                                              const int (&x_row)[kTokenTiles], const float* corrections, int column,
                                              int width, int lane, Accumulator<kTokenTiles> (&sum)[kRowTiles]) {
  // More tiles at once give the scheduler more to overlap, fewer leave registers for more tokens.
  constexpr int kUnit = kGroup > kTileCols ? kGroup / kTileCols : 1;
  constexpr int kTiles = kTokenTiles == 1 ? 2 * kUnit : kUnit;
  const uint8_t* scales = stage + int4_tile_codes(kRowTiles) + 4 * (lane >> 2);
  x += 2 * column + 16 * (lane & 3);
  corrections += column / kGroup * (8 * kTokenTiles) + 2 * (lane & 3);
  int done = 0;
  for (; done + kTiles * kTileCols <= width; done += kTiles * kTileCols)
    multiply_tiles<kGroup, kTiles, kTokenTiles, kRowTiles>(
        stage + done * (kTileRows / 2), scales + done / kGroup * (kTileRows * 2), scale_is_fp16, x + 2 * done, x_row,
        corrections + done / kGroup * (8 * kTokenTiles), lane, sum);
  if constexpr (kTiles > kUnit) {
#pragma unroll 1
    for (; done < width; done += kUnit * kTileCols)
      multiply_tiles<kGroup, kUnit, kTokenTiles, kRowTiles>(
          stage + done * (kTileRows / 2), scales + done / kGroup * (kTileRows * 2), scale_is_fp16, x + 2 * done, x_row,
          corrections + done / kGroup * (8 * kTokenTiles), lane, sum);
  }
}

// A chunk of E4M3 or BF16. A lane's 16 bytes of a row are neighbouring columns: the same permutation of K on both
// operands (activation_stage.cuh) leaves the product what it was.
template <int kFormat, int kTokenTiles, int kRowTiles>
__device__ __forceinline__ void multiply_rows(const uint8_t* stage, const uint8_t* x, const int (&x_row)[kTokenTiles],
                                              int column, int width, int lane,
                                              Accumulator<kTokenTiles> (&sum)[kRowTiles]) {
  constexpr int kBlock = kFormat == FUT_BF16 ? 32 : 64;  // columns of one 16-byte load of each of a row's four lanes
  const int g = lane >> 2, t = lane & 3;
  for (int block = 0; block * kBlock < width; ++block) {
    const int have = width - block * kBlock - t * (kBlock / 4);  // columns that exist from this lane's first on
#pragma unroll
    for (int part = 0; part < kBlock / 32; ++part) {
      uint4 b[kTokenTiles];
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j)
        b[j] = *reinterpret_cast<const uint4*>(x + x_row[j] + 2 * (column + block * kBlock + 32 * part) + 16 * t);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        const uint8_t* row = stage + (r * kTileRows + g) * kRowPitch + block * 64 + 16 * t;
        if constexpr (kFormat == FUT_BF16) {
          // What lies past the matrix is whatever the stage held before.
          uint4 low = make_uint4(0, 0, 0, 0), high = low;
          if (have > 0) {
            low = *reinterpret_cast<const uint4*>(row);
            high = *reinterpret_cast<const uint4*>(row + 8 * kRowPitch);
          }
#pragma unroll
          for (int j = 0; j < kTokenTiles; ++j) {
            mma_bf16(sum[r][j], low.x, high.x, low.y, high.y, b[j].x, b[j].y);
            mma_bf16(sum[r][j], low.z, high.z, low.w, high.w, b[j].z, b[j].w);
          }
        } else {
          uint2 low = make_uint2(0, 0), high = low;
          if (have > 0) {
            low = *reinterpret_cast<const uint2*>(row + 8 * part);
            high = *reinterpret_cast<const uint2*>(row + 8 * kRowPitch + 8 * part);
          }
          const uint32_t a[8] = {e4m3x2_to_fp16x2(low.x & 0xffff), e4m3x2_to_fp16x2(high.x & 0xffff),
                                 e4m3x2_to_fp16x2(low.x >> 16),    e4m3x2_to_fp16x2(high.x >> 16),
                                 e4m3x2_to_fp16x2(low.y & 0xffff), e4m3x2_to_fp16x2(high.y & 0xffff),
                                 e4m3x2_to_fp16x2(low.y >> 16),    e4m3x2_to_fp16x2(high.y >> 16)};
#pragma unroll
          for (int j = 0; j < kTokenTiles; ++j) {
            mma_fp16(sum[r][j], a[0], a[1], a[2], a[3], b[j].x, b[j].y);
            mma_fp16(sum[r][j], a[4], a[5], a[6], a[7], b[j].z, b[j].w);
          }
        }
      }
    }
  }
}

}  // namespace fut
