// Sizes and parameters of a projection's launch, and where its shared memory lies.

#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "../format.h"
#include "../fut.h"

namespace fut {

inline constexpr int kSlices = 8;
inline constexpr int kProjectionWarps = 8;
inline constexpr int kProjectionThreads = 32 * (kProjectionWarps + 1);  // one more warp finishes rows
inline constexpr int kMostTokens = 32;                                  // tokens of one launch

// A stage of INT4 holds this many columns of a row tile: codes, then scales. Long copies are faster; where two row
// tiles and many tokens need the room, they are half as long.
constexpr __host__ __device__ int int4_chunk_cols(int row_tiles) { return row_tiles == 1 ? 512 : 256; }
constexpr __host__ __device__ int int4_tile_codes(int row_tiles) { return kTileRows * int4_chunk_cols(row_tiles) / 2; }
// E4M3 and BF16 stages hold 256 bytes of each of 16 rows; the pitch spreads the rows over the banks.
inline constexpr int kRowBytes = 256;
inline constexpr int kRowPitch = kRowBytes + 64;

constexpr __host__ __device__ int int4_tile_stage(int group, int row_tiles) {
  return int4_tile_codes(row_tiles) + int4_chunk_cols(row_tiles) / group * kTileRows * 2;
}

constexpr __host__ __device__ int chunk_cols(int format, int row_tiles) {
  return format == FUT_INT4 ? int4_chunk_cols(row_tiles) : format == FUT_E4M3 ? kRowBytes : kRowBytes / 2;
}

constexpr __host__ __device__ int stage_bytes(int format, int group, int row_tiles) {
  return row_tiles * (format == FUT_INT4 ? int4_tile_stage(group, row_tiles) : kTileRows * kRowPitch);
}

struct ProjectionParams {
  const uint8_t* weight;
  const uint8_t* scale;        // INT4 group scales
  const float* channel_scale;  // E4M3 [stored_rows]
  const float* bias;           // [rows]
  const float* gain;           // [cols]
  const __nv_bfloat16* x;      // [*, cols]
  const float* square_sums;    // [*, square_parts] partial sums of squares of x: RMSNorm before the product; or null
  const int32_t* gather;       // [tokens] rows of x and square_sums to take, or null for 0 .. tokens - 1
  void* y;
  float* y_square_sums;  // FUT_RESIDUAL: [tokens, tiles]
  float eps;
  int32_t rows, cols;          // true sizes
  int32_t tiles, stored_cols;  // row tiles of 16
  int32_t units, unit_cols;    // K in units, the least that a slice takes
  int32_t scale_is_fp16;
  int32_t tokens, square_parts;
  int32_t epilogue, row_order;
  int32_t cluster, stages, slots;  // CTAs of a cluster; stages of a warp's ring; rounds of partial sums in flight

  // First column of a slice of K.
  __host__ __device__ int slice_begin(int slice) const {
    return static_cast<int>(static_cast<int64_t>(slice) * units / kSlices) * unit_cols;
  }
};

// Most columns that a CTA of a cluster holds.
inline __host__ __device__ int local_columns(const ProjectionParams& p) {
  const int local = kSlices / p.cluster;
  int most = 0;
  for (int rank = 0; rank < p.cluster; ++rank) {
    const int columns = p.slice_begin((rank + 1) * local) - p.slice_begin(rank * local);
    most = columns > most ? columns : most;
  }
  return most;
}

// Byte offsets into a CTA's dynamic shared memory.
struct ProjectionLayout {
  int ring, x, corrections, factors, row_factors, partial, barriers, total;
  int x_pitch;
  int slot_floats;  // partial sums of a round, as the lanes hold them: [slice][row tile][token tile][lane][4]

  __host__ __device__ ProjectionLayout(const ProjectionParams& p, int format, int group, int token_tiles,
                                       int row_tiles) {
    const int local = local_columns(p);
    x_pitch = 2 * local + 64;  // 64 modulo 128: the rows of two tokens share no bank
    ring = 0;
    x = ring + kProjectionWarps * p.stages * stage_bytes(format, group, row_tiles);
    corrections = x + p.tokens * x_pitch;
    const int groups = format == FUT_INT4 ? local / group : 0;
    factors = corrections + groups * 8 * token_tiles * 4;
    row_factors = factors + kSlices / p.cluster * kMostTokens * 4;
    partial = row_factors + kMostTokens * 4;
    slot_floats = kSlices * row_tiles * token_tiles * kLanes * 4;
    barriers = partial + p.slots * slot_floats * 4;
    // A ring's stages, then the slots that are full, then for every slot and CTA of the cluster that it is free again.
    total = barriers + (kProjectionWarps * p.stages + p.slots * (1 + p.cluster)) * 8;
  }
};

}  // namespace fut
