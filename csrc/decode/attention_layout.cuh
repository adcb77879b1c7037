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
  uint32_t* arrived;   // [kMaxRows, heads]: pieces merged so far; wraps to zero with the last
  float2* piece_sums;  // [rows, heads, max_pieces]: maximum and denominator
  float* piece_out;    // [rows, heads, max_pieces, head_dim]
  int table_width;
  int rows, heads, kv_heads, group;
  int max_pieces;
  int stages;
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
  static constexpr int kWarps = kHeadTiles == 1 ? 8 : 4;
  static constexpr int kThreads = 32 * (kWarps + 1);
  static constexpr int kBlockBytes = kBits == 4 ? Int4Block<kDim>::kBytes : Bf16Block<kDim>::kBytes;
  // A ring slot: a whole INT4 block, or keys and values of 16 tokens of a BF16 block.
  static constexpr int kSlotTokens = kBits == 4 ? kPageTokens : 16;
  static constexpr int kSlotBytes = kBlockBytes / (kPageTokens / kSlotTokens);
  // What a warp takes at a time.
  static constexpr int kUnitTokens = kBits == 4 ? 32 : 16;
  static constexpr int kUnitsPerSlot = kSlotTokens / kUnitTokens;
  static constexpr int kUnitsPerPage = kPageTokens / kUnitTokens;
  // Heads a merge takes at a time, and the padded row of a head, free of bank conflicts for fragments.
  static constexpr int kMergeHeads = 8;
  static constexpr int kMergeRow = kDim + 4;
};

struct ItemRecord {
  Item item;
  uint32_t first_slot;    // slots that the ring had passed before the item's first
  uint8_t* append_block;  // block of the newest token, or null where the item does not hold it
};

inline constexpr int kItemSlots = 2;
inline constexpr int kMaxStages = 32;

struct AttentionBarriers {
  uint64_t slot_full[kMaxStages];
  uint64_t slot_empty[kMaxStages];
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
  static constexpr int kQuery = align(kRecords + kItemSlots * static_cast<int>(sizeof(ItemRecord)));
  static constexpr int kHeads = align(kQuery + QueryFragments<kDim, Traits::kHeadTiles>::kBytes);
  static constexpr int kNewest = align(kHeads + Traits::kHeadTiles * 8 * 8);
  static constexpr int kMergeSums = align(kNewest + static_cast<int>(sizeof(NewestToken<kDim>)));
  static constexpr int kRaw = align(kMergeSums + Traits::kWarps * Traits::kMergeHeads * 8);

  // FP32 as it comes from the projection: queries of the group, key, value; then cosines and sines of the token.
  FUT_HD static constexpr int raw_bytes(int group) { return align((group + 3) * kDim * 4); }
  FUT_HD static constexpr int raw(int group, int item_slot) { return kRaw + item_slot * raw_bytes(group); }
  FUT_HD static constexpr int merge(int group) { return raw(group, kItemSlots); }
  FUT_HD static constexpr int merge_heads(int group) {
    return group < Traits::kMergeHeads ? group : Traits::kMergeHeads;
  }
  FUT_HD static constexpr int ring(int group) {
    return align(merge(group) + Traits::kWarps * merge_heads(group) * Traits::kMergeRow * 4);
  }
  FUT_HD static constexpr int bytes(int group, int stages) { return ring(group) + stages * Traits::kSlotBytes; }
};

// Position in a ring of `stages` slots and the parity of its barriers.
struct RingCursor {
  int stage = 0;
  uint32_t parity = 0;

  RingCursor() = default;
  __device__ __forceinline__ RingCursor(uint32_t passed, int stages)
      : stage(static_cast<int>(passed % stages)), parity(passed / stages & 1) {}

  __device__ __forceinline__ void advance(int slots, int stages) {
    stage += slots;
    while (stage >= stages) {
      stage -= stages;
      parity ^= 1;
    }
  }
};

}  // namespace fut
