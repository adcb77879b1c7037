// What the attention kernel is called with, and what lies where in its shared memory.

#pragma once

#include <cuda_bf16.h>

#include "attention_unit.cuh"
#include "attention_work.cuh"
#include "kv_append.cuh"
#include "kv_block.cuh"

namespace fut {

struct AttentionParams {
  const float* qkv;
  const float* q_norm;
  const float* k_norm;
  const float* rope_cos;
  const float* rope_sin;
  uint8_t* layer_pool;  // block of page 0, this layer, KV head 0
  int64_t page_stride;  // bytes from a page to the next
  const int32_t* position;
  const int32_t* slot;
  const int32_t* page_table;
  __nv_bfloat16* out;
  uint32_t* arrived;   // [kMaxRows, heads]: pieces merged so far; zero again after the last
  float2* piece_sums;  // [rows, heads, max_pieces]: maximum and denominator
  float* piece_out;    // [rows, heads, max_pieces, head_dim]
  int table_width;
  int rows, heads, kv_heads, group;
  int max_pieces;
  int ring_shift;  // 2^ring_shift slots
  float eps;
  float score_scale;  // head_dim^-0.5 log2(e)
  bool rotation, zero_point;
  bool append;       // the item with the newest token writes its K and V
  bool cache_ready;  // AttentionCall
};

template <int kDim_, int kBits_, int kHeadTiles_>
struct AttentionTraits {
  static constexpr int kDim = kDim_;
  static constexpr int kBits = kBits_;
  static constexpr int kHeadTiles = kHeadTiles_;
  static constexpr int kTiles = kDim / 16;
  // Two CTAs fit an SM, so that consecutive kernels overlap: registers go to more warps or to more heads a warp.
  static constexpr int kWarps = kBits == 4 && kHeadTiles == 1 ? 8 : 4;
  static constexpr int kThreads = 32 * (kWarps + 1);
  static constexpr int kBlockBytes = kBits == 4 ? Int4Block<kDim>::kBytes : Bf16Block<kDim>::kBytes;
  // A ring slot: a whole INT4 block, or keys and values of 16 tokens of a BF16 block.
  static constexpr int kSlotTokens = kBits == 4 ? kPageTokens : 16;
  static constexpr int kSlotBytes = kBlockBytes / (kPageTokens / kSlotTokens);
  // What a warp takes at a time.
  static constexpr int kUnitTokens = kBits == 4 ? 32 : 16;
  static constexpr int kUnitsPerSlot = kSlotTokens / kUnitTokens;
  // From a slot of a warp to its next one. The ring must have at least as many slots: see AttentionConsumer::attend.
  static constexpr int kSlotStep = kWarps / kUnitsPerSlot;
  // Heads a merge takes at a time, and the padded row of a head, free of bank conflicts for fragments.
  static constexpr int kMergeHeads = 8;
  static constexpr int kMergeRow = kDim + 4;
};

struct ItemRecord {
  Item item;
  uint32_t first_slot;    // slots that the ring had passed before the item's first
  uint8_t* append_block;  // block of the newest token, or null where the item does not hold it
};

// Items announced ahead: short ones must not keep the ring from filling.
inline constexpr int kItemSlots = 4;
inline constexpr int kMostRingShift = 4;

struct AttentionBarriers {
  uint64_t slot_full[1 << kMostRingShift];
  uint64_t slot_empty[1 << kMostRingShift];
  uint64_t item_full[kItemSlots];
  uint64_t item_empty[kItemSlots];
};

// Shared memory: parts of fixed size, parts that depend on the group, then the ring. All offsets are multiples of 128.
template <class Traits>
struct SharedLayout {
  static constexpr int kDim = Traits::kDim;

  FUT_HD static constexpr int align(int bytes) { return (bytes + 127) / 128 * 128; }

  static constexpr int kBarriers = 0;
  static constexpr int kRecords = align(kBarriers + static_cast<int>(sizeof(AttentionBarriers)));
  static constexpr int kRows = align(kRecords + kItemSlots * static_cast<int>(sizeof(ItemRecord)));
  static constexpr int kQuery = align(kRows + kMaxRows * static_cast<int>(sizeof(RowEntry)));
  static constexpr int kHeads = align(kQuery + QueryFragments<kDim, Traits::kHeadTiles>::kBytes);
  static constexpr int kNewest = align(kHeads + Traits::kHeadTiles * 8 * 8);
  static constexpr int kMergeSums = align(kNewest + static_cast<int>(sizeof(NewestToken<kDim>)));
  static constexpr int kItemsPassed = align(kMergeSums + Traits::kWarps * Traits::kMergeHeads * 8);
  static constexpr int kMerge = align(kItemsPassed + Traits::kWarps * 4);

  FUT_HD static constexpr int merge_heads(int group) {
    return group < Traits::kMergeHeads ? group : Traits::kMergeHeads;
  }
  FUT_HD static constexpr int ring(int group) {
    return align(kMerge + Traits::kWarps * merge_heads(group) * Traits::kMergeRow * 4);
  }
  FUT_HD static constexpr int bytes(int group, int ring_shift) {
    return ring(group) + (Traits::kSlotBytes << ring_shift);
  }
};

// Where slot `number`, counted over all items of the CTA, lies in a ring of 2^shift slots, and the parity of its use.
struct RingPlace {
  int stage;
  uint32_t parity;

  __device__ __forceinline__ RingPlace(uint32_t number, int shift)
      : stage(static_cast<int>(number & ((1u << shift) - 1))), parity(number >> shift & 1) {}
};

}  // namespace fut
