// How contexts are cut into work items. An item is one piece of the context of one (row, KV head); its size depends on
// the context and the shape only, never on the batch, so that a row gives the same bits alone and in company.
//
// The host part needs nothing but C++17.

#pragma once

#include <cstdint>

#include "../format.h"

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

#ifdef __CUDACC__

struct Item {
  int row, kv_head;
  int piece, pieces;
  int first_token, tokens;  // of the piece
  int context;              // of the row
};

// What an item is found by: a row's context, its slot, and the number of items up to and with this row.
struct RowEntry {
  int end;
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
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int context = max(entry[part].context, 0);
    const int shift = piece_shift(context, kv_heads);
    int end = ((context + (1 << shift) - 1) >> shift) * kv_heads;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += other;
    }
    entry[part].end = before + end;
    before = __shfl_sync(~0u, entry[part].end, 31);
    entries[lane + 32 * part] = entry[part];
  }
  __syncwarp();
  return before;
}

// Item `index` < the number of items; each lane may ask for another one.
__device__ __forceinline__ Item find_item(const RowEntry* entries, int index, int kv_heads) {
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
  item.piece = static_cast<int>(within / static_cast<uint32_t>(kv_heads));
  item.kv_head = static_cast<int>(within) - item.piece * kv_heads;
  item.first_token = item.piece << shift;
  item.tokens = min(1 << shift, entry.context - item.first_token);
  return item;
}

#endif  // __CUDACC__

}  // namespace fut
