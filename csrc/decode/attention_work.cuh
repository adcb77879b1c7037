// How contexts are cut into work items. An item is one piece of the context of one (row, KV head); its size depends on
// the context and the shape only, never on the batch, so that a row gives the same bits alone and in company.
//
// The host part needs nothing but C++17.

#pragma once

#include <cstdint>

#include "../format.h"

namespace fut {

inline constexpr int kMaxRows = 64;
inline constexpr int kSmallestPiece = 256;
// 32 pages: their ids fit one register of a warp.
inline constexpr int kLargestPiece = 2048;

// About one wave of items at batch 1 on 132 SMs.
FUT_HD constexpr int pieces_wanted(int kv_heads) {
  const int pieces = 128 / kv_heads;
  return pieces < 4 ? 4 : pieces > 64 ? 64 : pieces;
}

FUT_HD constexpr int piece_tokens(int context, int kv_heads) {
  const int wanted = pieces_wanted(kv_heads);
  int tokens = kSmallestPiece;
  while (tokens < kLargestPiece && (context + tokens - 1) / tokens > wanted) tokens *= 2;
  return tokens;
}

// The most pieces that any context up to `max_context` has.
FUT_HD constexpr int max_pieces(int max_context, int kv_heads) {
  const int small = (max_context + kSmallestPiece - 1) / kSmallestPiece;
  const int large = (max_context + kLargestPiece - 1) / kLargestPiece;
  const int wanted = pieces_wanted(kv_heads);
  const int bounded = small < wanted ? small : wanted;
  return bounded > large ? bounded : large;
}

#ifdef __CUDACC__

struct Item {
  int row, kv_head;
  int piece, pieces;
  int first_token, tokens;  // of the piece
  int context;              // of the row
};

// All items of a launch, in the registers of a warp: lane l holds rows l and l + 32.
class WorkList {
 public:
  // All lanes. A row whose position is negative has no items.
  __device__ __forceinline__ WorkList(const int32_t* position, int rows, int kv_heads, int lane) : kv_heads_(kv_heads) {
    int before = 0;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int row = lane + 32 * part;
      context_[part] = row < rows ? position[row] + 1 : 0;
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int context = max(context_[part], 0);
      const int size = piece_tokens(context, kv_heads);
      int end = (context + size - 1) / size * kv_heads;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, end, step);
        if (lane >= step) end += other;
      }
      end_[part] = before + end;
      before = __shfl_sync(~0u, end_[part], 31);
    }
    total_ = before;
  }

  __device__ __forceinline__ int total() const { return total_; }

  // All lanes; index < total().
  __device__ __forceinline__ Item find(int index) const {
    Item item;
    item.row = __popc(__ballot_sync(~0u, index >= end_[0])) + __popc(__ballot_sync(~0u, index >= end_[1]));
    const int low = __shfl_sync(~0u, context_[0], item.row & 31);
    const int high = __shfl_sync(~0u, context_[1], item.row & 31);
    const int end_low = __shfl_sync(~0u, end_[0], item.row & 31);
    const int end_high = __shfl_sync(~0u, end_[1], item.row & 31);
    item.context = item.row < 32 ? low : high;
    const int size = piece_tokens(item.context, kv_heads_);
    item.pieces = (item.context + size - 1) / size;
    const int within = index - ((item.row < 32 ? end_low : end_high) - item.pieces * kv_heads_);
    item.piece = within / kv_heads_;
    item.kv_head = within - item.piece * kv_heads_;
    item.first_token = item.piece * size;
    item.tokens = min(size, item.context - item.first_token);
    return item;
  }

 private:
  int context_[2];
  int end_[2];
  int total_;
  int kv_heads_;
};

#endif  // __CUDACC__

}  // namespace fut
