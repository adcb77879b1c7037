// The weights of one warp, as bulk copies bring them into its ring in shared memory.

#pragma once

#include <cstdint>

#include "../fut.h"
#include "../ptx/bulk_copy.cuh"
#include "projection_params.cuh"

namespace fut {

// What one warp reads: a slice of K of `kRowTiles` neighbouring row tiles in every round. Addresses are kept and moved,
// never computed anew: this runs once a chunk on one lane while the others wait.
template <int kFormat, int kGroup, int kRowTiles>
struct WeightStream {
  static constexpr int kColumnBytes = kFormat == FUT_INT4 ? kTileRows / 2 : kFormat == FUT_BF16 ? 2 : 1;
  static constexpr int kStageBytes = stage_bytes(kFormat, kGroup, kRowTiles);

  const ProjectionParams& p;
  uint8_t* ring;
  uint64_t* full;
  const uint8_t* next;        // INT4: codes of the next chunk; else: this lane's row of it
  const uint8_t* next_scale;  // INT4
  int tile, end_tile, tiles_a_round;
  int columns, left;  // of the slice, and what is not fetched of it
  int stage = 0;
  int lane;

  __device__ __forceinline__ WeightStream(const ProjectionParams& params, uint8_t* warp_ring, uint64_t* warp_full,
                                          int first, int end, int round, int begin, int width, int lane_of_warp)
      : p(params),
        ring(warp_ring),
        full(warp_full),
        tile(first),
        end_tile(width > 0 ? end : 0),
        tiles_a_round(round),
        columns(width),
        left(width),
        lane(lane_of_warp) {
    next = p.weight + first * tile_stride() + begin * kColumnBytes;
    if constexpr (kFormat == FUT_INT4)
      next_scale = p.scale + first * scale_stride() + begin / kGroup * (kTileRows * 2);
    else
      next += static_cast<int64_t>(lane & 15) * p.stored_cols * kColumnBytes;
  }

  // Bytes from a row tile to the next.
  __device__ __forceinline__ int64_t tile_stride() const {
    return static_cast<int64_t>(p.stored_cols) * (kFormat == FUT_INT4 ? kColumnBytes : kTileRows * kColumnBytes);
  }
  __device__ __forceinline__ int64_t scale_stride() const {
    return static_cast<int64_t>(p.stored_cols / kGroup) * (kTileRows * 2);
  }

  __device__ __forceinline__ bool more() const { return tile < end_tile; }

  // Starts the copy of the next chunk into the next stage, which must be free.
  __device__ __forceinline__ void fetch() {
    const int width = min(chunk_cols(kFormat, kRowTiles), left);
    const int tiles = min(kRowTiles, end_tile - tile);
    uint8_t* to = ring + stage * kStageBytes;
    uint64_t* barrier = full + stage;
    const uint64_t policy = evict_first_policy();
    if constexpr (kFormat == FUT_INT4) {
      if (lane == 0) {
        const uint32_t code_bytes = width * kColumnBytes;
        const uint32_t scale_bytes = width / kGroup * (kTileRows * 2);
        barrier_expect(barrier, tiles * (code_bytes + scale_bytes));
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
          if (r < tiles) {
            uint8_t* place = to + r * int4_tile_stage(kGroup, kRowTiles);
            bulk_copy(place, next + r * tile_stride(), code_bytes, barrier, policy);
            bulk_copy(place + int4_tile_codes(kRowTiles), next_scale + r * scale_stride(), scale_bytes, barrier,
                      policy);
          }
      }
      next_scale += width / kGroup * (kTileRows * 2);
    } else {
      const uint32_t row_bytes = width * kColumnBytes;
      if (lane == 0) barrier_expect(barrier, tiles * kTileRows * row_bytes);
      __syncwarp();
      if (lane < kTileRows)
        for (int r = 0; r < tiles; ++r)
          bulk_copy(to + (r * kTileRows + lane) * kRowPitch, next + r * tile_stride(), row_bytes, barrier, policy);
    }
    next += width * kColumnBytes;
    left -= width;
    if (++stage == p.stages) stage = 0;
    if (left == 0) {
      next += tiles_a_round * tile_stride() - columns * kColumnBytes;
      if constexpr (kFormat == FUT_INT4)
        next_scale += tiles_a_round * scale_stride() - columns / kGroup * (kTileRows * 2);
      tile += tiles_a_round;
      left = columns;
    }
  }
};

}  // namespace fut
