// How contexts are cut into work items. An item is one piece of the context of one (row, KV head); its size depends on
// the context and the shape only, never on the batch, so that a row gives the same bits alone and in company.
//
// The host part needs nothing but C++17.

#pragma once

#include <cstdint>

#include "../format.h"
#include "kv_block.cuh"

namespace fut {

inline constexpr int kMaxRows = 64;
inline constexpr int kSmallestPieceShift = 8;
// 2048 tokens, 32 pages: their ids fit one register of a warp.
inline constexpr int kLargestPieceShift = 11;

// About one wave of items at batch 1 on 132 SMs.
FUT_HD constexpr int pieces_wanted(int kv_heads) {
  const int pieces = 128 / kv_heads;
  return pieces < 4 ? 4 : pieces > 64 ? 64 : pieces;
}

// Base-2 logarithm of the tokens of a piece.
FUT_HD constexpr int piece_shift(int context, int kv_heads) {
  const int wanted = pieces_wanted(kv_heads);
  int shift = kSmallestPieceShift;
  while (shift < kLargestPieceShift && context > wanted << shift) ++shift;
  return shift;
}

// The most pieces that any context up to `max_context` has.
FUT_HD constexpr int max_pieces(int max_context, int kv_heads) {
  const int small = (max_context + (1 << kSmallestPieceShift) - 1) >> kSmallestPieceShift;
  const int large = (max_context + (1 << kLargestPieceShift) - 1) >> kLargestPieceShift;
  const int wanted = pieces_wanted(kv_heads);
  const int bounded = small < wanted ? small : wanted;
  return bounded > large ? bounded : large;
}

// What a piece costs beside its pages, in pages: merging the sums of the warps.
inline constexpr int kPieceCost = 3;

// Cost of the pieces of one (row, KV head), in pages.
FUT_HD constexpr int context_cost(int context, int kv_heads) {
  const int shift = piece_shift(context, kv_heads);
  return ((context + (1 << shift) - 1) >> shift) * kPieceCost + (context + kPageTokens - 1) / kPageTokens;
}

#ifdef __CUDACC__

// Items are numbered by row, KV head and piece, in this order. A CTA takes neighbouring ones: what it takes of one
// (row, KV head) is a run.
struct Item {
  int row, kv_head;
  int piece, pieces;
  int first_token, tokens;  // of the piece
  int context;              // of the row
  int run;                  // pieces of the run up to and with this one
  bool ends;                // the run
};

// What an item is found by: a row's context, its slot, and items and their cost up to and with this row.
struct RowEntry {
  int end;
  int cost_end;
  int context;
  int slot;
};

// Fills the rows' entries in shared memory; all lanes of a warp. Returns the number of items. A row whose position is
// negative has none.
__device__ __forceinline__ int list_rows(RowEntry* entries, const int32_t* position, const int32_t* slot, int rows,
                                         int kv_heads, int lane) {
  RowEntry entry[2];
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int row = lane + 32 * part;
    entry[part].context = row < rows ? position[row] + 1 : 0;
    entry[part].slot = row < rows ? slot[row] : 0;
  }
  int before = 0;
  int cost_before = 0;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int context = max(entry[part].context, 0);
    const int shift = piece_shift(context, kv_heads);
    int end = ((context + (1 << shift) - 1) >> shift) * kv_heads;
    int cost = context_cost(context, kv_heads) * kv_heads;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, end, step);
      const int other_cost = __shfl_up_sync(~0u, cost, step);
      if (lane >= step) end += other, cost += other_cost;
    }
    entry[part].end = before + end;
    entry[part].cost_end = cost_before + cost;
    before = __shfl_sync(~0u, entry[part].end, 31);
    cost_before = __shfl_sync(~0u, entry[part].cost_end, 31);
    entries[lane + 32 * part] = entry[part];
  }
  __syncwarp();
  return before;
}

// The first item of CTA `cta` of `ctas` where all cost about the same: items before cost at least cta / ctas of all.
__device__ __forceinline__ int first_item(const RowEntry* entries, int items, int kv_heads, int cta, int ctas) {
  if (items <= ctas) return min(cta, items);
  const int total = entries[kMaxRows - 1].cost_end;
  const int target = static_cast<int>(int64_t{total} * cta / ctas);
  if (target >= total) return items;
  int row = 0;
#pragma unroll
  for (int step = kMaxRows / 2; step > 0; step /= 2) {
    if (entries[row + step - 1].cost_end <= target) row += step;
  }
  const int context = entries[row].context;
  const int shift = piece_shift(context, kv_heads);
  const int pieces = (context + (1 << shift) - 1) >> shift;
  const int head_cost = context_cost(context, kv_heads);
  const int piece_cost = kPieceCost + (1 << shift) / kPageTokens;
  const int within = target - (entries[row].cost_end - head_cost * kv_heads);
  const int head = within / head_cost;
  const int piece = min((within - head * head_cost + piece_cost - 1) / piece_cost, pieces);
  return entries[row].end - (kv_heads - head) * pieces + piece;
}

// Item `index` of a CTA that takes first <= index < end; each lane may ask for another one.
__device__ __forceinline__ Item find_item(const RowEntry* entries, int index, int first, int end, int kv_heads) {
  Item item;
  item.row = 0;
#pragma unroll
  for (int step = kMaxRows / 2; step > 0; step /= 2) {
    if (entries[item.row + step - 1].end <= index) item.row += step;
  }
  const RowEntry entry = entries[item.row];
  const int shift = piece_shift(entry.context, kv_heads);
  item.context = entry.context;
  item.pieces = (entry.context + (1 << shift) - 1) >> shift;
  const uint32_t within = index - (entry.end - item.pieces * kv_heads);
  item.kv_head = static_cast<int>(within / static_cast<uint32_t>(item.pieces));
  item.piece = static_cast<int>(within) - item.kv_head * item.pieces;
  item.first_token = item.piece << shift;
  item.tokens = min(1 << shift, entry.context - item.first_token);
  item.run = min(item.piece, index - first) + 1;
  item.ends = item.piece == item.pieces - 1 || index == end - 1;
  return item;
}

#endif  // __CUDACC__

}  // namespace fut
