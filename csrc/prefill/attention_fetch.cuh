// What brings an attention tile's operands into shared memory: a warp for K and V, through the copy engine page by
// page, and a warp for each 64 rows of Q.

#pragma once

#include "../ptx/tensor_copy.cuh"
#include "../ptx/thread.cuh"
#include "attention_shared.cuh"

namespace fut {

inline constexpr int kStepPages = kAttentionKeys / FUT_PAGE_TOKENS;

// Pages of a tile's keys, as rows of the history's matrix; 32 looked up at once. One warp.
struct PageRows {
  const int32_t* table;
  int count, scale, offset, no_row, lane;
  int held = 0;

  __device__ __forceinline__ PageRows(const AttentionParams& p, const AttentionTile& tile, int lane)
      : table(p.page_table + static_cast<int64_t>(tile.slot) * p.table_width),
        count((tile.keys + FUT_PAGE_TOKENS - 1) / FUT_PAGE_TOKENS),
        scale(p.kv_heads * FUT_PAGE_TOKENS),
        offset(tile.kv_head * FUT_PAGE_TOKENS),
        no_row(p.no_row),
        lane(lane) {}
  // The rows of a step's pages; a page that the tile does not see reads as zeros. Steps come one after another.
  __device__ __forceinline__ void of_step(int step, int (&rows)[kStepPages]) {
    const int first = step * kStepPages;
    if (first % 32 == 0) held = first + lane < count ? table[first + lane] * scale + offset : no_row;
#pragma unroll
    for (int i = 0; i < kStepPages; ++i) rows[i] = __shfl_sync(~0u, held, (first + i) % 32);
  }
};

// Copies a step of K or V; its bytes complete on `barrier`. One thread.
template <int kDim>
__device__ __forceinline__ void copy_step(
    uint8_t (&stage)[HeadLayout<kDim>::kBlocks][kAttentionKeys * HeadLayout<kDim>::kRowBytes], const CUtensorMap* map,
    const int (&rows)[kStepPages], uint64_t* barrier) {
  constexpr int kRowBytes = HeadLayout<kDim>::kRowBytes;
  barrier_expect(barrier, HeadLayout<kDim>::kStageBytes);
#pragma unroll
  for (int page = 0; page < kStepPages; ++page)
#pragma unroll
    for (int block = 0; block < HeadLayout<kDim>::kBlocks; ++block)
      tensor_copy(stage[block] + page * FUT_PAGE_TOKENS * kRowBytes, map, block * (kRowBytes / 2), rows[page], barrier);
}

// The next tile, and gives its slot back. One warp.
template <int kDim>
__device__ __forceinline__ AttentionTile read_tile(AttentionShared<kDim>& shared, RingPlace<kTileSlots>& slot,
                                                   int lane) {
  barrier_wait(&shared.tile_full[slot.stage], slot.phase);
  const AttentionTile tile = shared.tiles[slot.stage];
  __syncwarp();
  if (lane == 0) barrier_arrive(&shared.tile_empty[slot.stage]);
  slot.advance();
  return tile;
}

// Clears rows of a step, whatever copies have left there. One warp.
template <int kDim>
__device__ __forceinline__ void clear_rows(
    uint8_t (&stage)[HeadLayout<kDim>::kBlocks][kAttentionKeys * HeadLayout<kDim>::kRowBytes], int begin, int end,
    int lane) {
  constexpr int kRowBytes = HeadLayout<kDim>::kRowBytes;
#pragma unroll 1
  for (int block = 0; block < HeadLayout<kDim>::kBlocks; ++block)
#pragma unroll 1
    for (int byte = begin * kRowBytes + 16 * lane; byte < end * kRowBytes; byte += 16 * 32)
      *reinterpret_cast<uint4*>(stage[block] + byte) = make_uint4(0, 0, 0, 0);
}

// One warp: chooses tiles, tells the others, and fetches their K and V.
template <int kDim>
__device__ __forceinline__ void fetch_history(AttentionShared<kDim>& shared, const CUtensorMap* map_k,
                                              const CUtensorMap* map_v, const AttentionParams& p, int lane) {
  PromptWalk walk(p, lane);
  HistoryPlace<kDim> k, v;
  RingPlace<kTileSlots> slot;
  int number = static_cast<int>(blockIdx.x);
  for (;;) {
    AttentionTile tile;
    const bool found = walk.find(number, tile);
    if (!found) tile.steps = 0;
    barrier_wait(&shared.tile_empty[slot.stage], slot.phase ^ 1);
    if (lane == 0) {
      shared.tiles[slot.stage] = tile;
      barrier_arrive(&shared.tile_full[slot.stage]);
      if (found) number = static_cast<int>(gridDim.x + arrive(p.counters, 1));
    }
    __syncwarp();
    if (!found) break;
    slot.advance();
    PageRows pages(p, tile, lane);
    int rows_k[kStepPages], rows_v[kStepPages];
    // V of a step after K of the next, as they are needed.
#pragma unroll 1
    for (int step = 0; step <= tile.steps; ++step) {
#pragma unroll
      for (int i = 0; i < kStepPages; ++i) rows_v[i] = rows_k[i];
      if (step < tile.steps) {
        pages.of_step(step, rows_k);
        barrier_wait(&shared.k.empty[k.stage], k.phase ^ 1);
        if (lane == 0) copy_step<kDim>(shared.k.data[k.stage], map_k, rows_k, &shared.k.full[k.stage]);
        k.advance();
      }
      if (step == 0) continue;
      barrier_wait(&shared.v.empty[v.stage], v.phase ^ 1);
      const bool ragged = step == tile.steps && tile.tail_begin() < tile.tail_end();
      uint64_t* arrived = ragged ? &shared.v_landed[v.stage] : &shared.v.full[v.stage];
      if (lane == 0) copy_step<kDim>(shared.v.data[v.stage], map_v, rows_v, arrived);
      v.advance();
    }
    number = __shfl_sync(~0u, number, 0);
  }
  // The last CTA leaves the counters as it found them.
  if (lane == 0 && arrive(p.counters + 1, 1) == gridDim.x - 1) p.counters[0] = p.counters[1] = 0;
}

// One warp: clears the tails of tiles' last steps of V, and only then says that those are full.
template <int kDim>
__device__ __forceinline__ void clear_tails(AttentionShared<kDim>& shared, int lane) {
  HistoryPlace<kDim> v;
  RingPlace<kTileSlots> slot;
  uint32_t phases = 0;  // of v_landed, a bit a stage
  for (;;) {
    const AttentionTile tile = read_tile(shared, slot, lane);
    if (tile.steps == 0) return;
    v.skip(tile.steps - 1);
    const int begin = tile.tail_begin(), end = tile.tail_end();
    if (begin < end) {
      barrier_wait(&shared.v_landed[v.stage], phases >> v.stage & 1);
      phases ^= 1u << v.stage;
      clear_rows<kDim>(shared.v.data[v.stage], begin, end, lane);
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) barrier_arrive(&shared.v.full[v.stage]);
    }
    v.advance();
  }
}

// One warp: rows 64 * part .. 64 * part + 63 of each tile. Rows past the tile's last keep what they held.
template <int kDim>
__device__ __forceinline__ void fetch_queries(AttentionShared<kDim>& shared, const AttentionParams& p, int part,
                                              int lane) {
  constexpr int kRowBytes = HeadLayout<kDim>::kRowBytes;
  constexpr int kPieces = kDim / 8;  // of 16 bytes, of a row
  constexpr int kLanesARow = kPieces <= 8 ? 8 : 16;
  constexpr int kRowsAtOnce = 32 / kLanesARow;
  RingPlace<kTileSlots> slot;
  uint32_t phase = 0;
  for (;;) {
    const AttentionTile tile = read_tile(shared, slot, lane);
    if (tile.steps == 0) return;
    const int rows = min(64, tile.rows - 64 * part);
    if (rows <= 0) continue;
    // Where this lane's rows, lane and lane + 32, begin in Q, in heads.
    int head[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tile.first + 64 * part + lane + 32 * i, token = row / p.group;
      head[i] = ((tile.row0 + token) * p.kv_heads + tile.kv_head) * p.group + row - token * p.group;
    }
    barrier_wait(&shared.q_empty[part], phase ^ 1);
    phase ^= 1;
    const int piece = lane % kLanesARow;
    const int block = piece * 16 / kRowBytes, along = piece * 16 % kRowBytes;
#pragma unroll 4
    for (int first = 0; first < 64; first += kRowsAtOnce) {
      const int row = first + lane / kLanesARow;
      const int from = __shfl_sync(~0u, first < 32 ? head[0] : head[1], row % 32);
      if (piece >= kPieces || row >= rows) continue;
      const uint32_t place = row * kRowBytes + along;
      cp_async_16(shared.q[part][block] + (place ^ (place >> 7 & (kRowBytes / 16 - 1)) << 4),
                  p.q + static_cast<int64_t>(from) * (2 * kDim) + 16 * piece);
    }
    cp_async_wait();
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.q_full[part]);
  }
}

}  // namespace fut
