// The order in which tiles are computed: the longest first, so that CTAs end together.

#pragma once

#include "../fut.h"
#include "attention_params.h"
#include "attention_plan.h"

namespace fut {

struct AttentionTile {
  int32_t request;
  int32_t slot;      // row of the page table
  int32_t row0;      // the chunk's first row of Q
  int32_t tokens;    // of the chunk
  int32_t position;  // of the chunk's first token
  int32_t first;     // the tile's first row among the chunk's tokens by query heads
  int32_t rows;      // of the tile
  int32_t kv_head;
  int32_t keys;   // that its last row attends to
  int32_t steps;  // of kAttentionKeys keys; 0: there are no more tiles

  // Rows of the last step's pages that belong to no token yet, and may hold anything: 0 times NaN would be NaN.
  __device__ __forceinline__ int tail_begin() const { return position + tokens - (steps - 1) * kAttentionKeys; }
  __device__ __forceinline__ int tail_end() const {
    const int pages = (keys + FUT_PAGE_TOKENS - 1) / FUT_PAGE_TOKENS;
    return pages * FUT_PAGE_TOKENS - (steps - 1) * kAttentionKeys;
  }
};

// Finds tiles by their number in that order. Levels come one after another, in a level the requests, in a request its
// KV heads, so that tiles that run together read the same keys. One warp, a request a lane.
class PromptWalk {
 public:
  __device__ __forceinline__ PromptWalk(const AttentionParams& params, int lane) : params_(params), lane_(lane) {
    load();
  }

  // False where there are no more. Numbers must ascend from call to call.
  __device__ __forceinline__ bool find(int number, AttentionTile& tile) {
    for (;;) {
      const int before = chunk_.up_to(level_ - 1);
      const int a_head = chunk_.up_to(level_) - before;
      int end = a_head * params_.kv_heads;
#pragma unroll
      for (int i = 1; i < 32; i *= 2) {
        const int other = __shfl_up_sync(~0u, end, i);
        if (lane_ >= i) end += other;
      }
      const int wanted = number - passed_;
      const int owner = __popc(__ballot_sync(~0u, end <= wanted));
      if (owner < 32) {
        place(tile, owner, wanted - __shfl_sync(~0u, end - a_head * params_.kv_heads, owner),
              __shfl_sync(~0u, before, owner), __shfl_sync(~0u, a_head, owner));
        return true;
      }
      passed_ += __shfl_sync(~0u, end, 31);
      next_level_ = max(next_level_, static_cast<int>(__reduce_max_sync(~0u, chunk_.below(level_))));
      if (!advance()) return false;
    }
  }

 private:
  // The next 32 requests, or the next level that has tiles.
  __device__ __forceinline__ bool advance() {
    first_ += 32;
    if (first_ >= params_.requests) {
      if (next_level_ == 0) return false;
      level_ = next_level_;
      next_level_ = first_ = 0;
      if (params_.requests <= 32) return true;
    }
    load();
    return true;
  }

  __device__ __forceinline__ void load() {
    const int request = first_ + lane_;
    chunk_ = {0, 0, params_.group};
    if (request >= params_.requests) return;
    row0_ = params_.first_row[request];
    chunk_.tokens = params_.first_row[request + 1] - row0_;
    chunk_.position = params_.first_position[request];
    slot_ = params_.slot[request];
  }

  // The request's tile number `index` of this level, whose tiles follow `before` others and are `a_head` a KV head.
  __device__ __forceinline__ void place(AttentionTile& tile, int owner, int index, int before, int a_head) const {
    const ChunkTiles chunk = {__shfl_sync(~0u, chunk_.position, owner), __shfl_sync(~0u, chunk_.tokens, owner),
                              params_.group};
    const int kv_head = index / a_head, number = before + index - kv_head * a_head;
    tile.request = first_ + owner;
    tile.slot = __shfl_sync(~0u, slot_, owner);
    tile.row0 = __shfl_sync(~0u, row0_, owner);
    tile.tokens = chunk.tokens;
    tile.position = chunk.position;
    tile.first = number * kAttentionRows;
    tile.rows = min(kAttentionRows, chunk.rows() - tile.first);
    tile.kv_head = kv_head;
    tile.keys = chunk.keys(number);
    tile.steps = level_;
  }

  const AttentionParams& params_;
  const int lane_;
  int first_ = 0, level_ = kNoLevel, next_level_ = 0;
  int passed_ = 0;  // tiles of the levels above and of the requests before
  int row0_ = 0, slot_ = 0;
  ChunkTiles chunk_;
};

}  // namespace fut
