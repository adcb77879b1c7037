// The producer warp of the attention kernel: finds the work items, hands out their queries, and keeps the ring of cache
// blocks filled.

#pragma once

#include "../ptx/dependency.cuh"
#include "../ptx/ring.cuh"
#include "attention_layout.cuh"

namespace fut {

template <class Traits>
class AttentionProducer {
 public:
  using Layout = SharedLayout<Traits>;

  __device__ AttentionProducer(const AttentionParams& params, uint8_t* shared)
      : params_(params),
        shared_(shared),
        policy_(evict_first_policy()),
        lane_(threadIdx.x & 31),
        row_slot_{},
        barriers_(*reinterpret_cast<AttentionBarriers*>(shared + Layout::kBarriers)) {}

  __device__ void run() {
    const bool ahead = params_.cache_ready;
    if (!ahead) start();
    const WorkList work(params_.position, params_.rows, params_.kv_heads, lane_);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      row_slot_[part] = lane_ + 32 * part < params_.rows ? params_.slot[lane_ + 32 * part] : 0;
    }
    RingCursor ring;
    RingCursor items;
    uint32_t passed = 0;
    bool first = true;
    Located next = locate(work, blockIdx.x);
    for (int index = blockIdx.x; index < work.total(); index += gridDim.x) {
      const Item item = next.item;
      const int page = next.page;
      next = locate(work, index + gridDim.x);
      const int slots = (item.tokens + Traits::kSlotTokens - 1) / Traits::kSlotTokens;
      const int last_page = __shfl_sync(~0u, page, (item.tokens - 1) / kPageTokens);
      // The cache may be read before the kernel before has finished, the item's queries may not.
      const int queries_at = first && ahead ? min(slots, params_.stages) : 0;
      for (int slot = 0; slot <= slots; ++slot) {
        if (slot == queries_at) {
          if (first && ahead) start();
          if (lane_ == 0) announce(item, last_page, passed, items);
        }
        if (slot == slots) break;
        const int id = __shfl_sync(~0u, page, slot * Traits::kSlotTokens / kPageTokens);
        if (lane_ == 0) copy_slot(item, id, slot, ring);
        ring.advance(1, params_.stages);
      }
      items.advance(1, kItemSlots);
      passed += slots;
      first = false;
    }
    if (first && ahead) start();
    if (lane_ == 0) {
      barrier_wait(&barriers_.item_empty[items.stage], items.parity ^ 1);
      record(items.stage)->item.pieces = 0;
      barrier_arrive(&barriers_.item_full[items.stage]);
    }
  }

 private:
  struct Located {
    Item item;
    int page;  // lane l: page l of the piece
  };

  __device__ __forceinline__ void start() {
    wait_for_previous_kernel();
    fence_async_proxy_global();
  }

  // The pages of an item are looked up while the item before it is still being copied.
  __device__ __forceinline__ Located locate(const WorkList& work, int index) const {
    Located located{};
    if (index >= work.total()) return located;
    located.item = work.find(index);
    const int low = __shfl_sync(~0u, row_slot_[0], located.item.row & 31);
    const int high = __shfl_sync(~0u, row_slot_[1], located.item.row & 31);
    const int64_t first = int64_t{located.item.row < 32 ? low : high} * params_.table_width;
    if (lane_ * kPageTokens < located.item.tokens) {
      located.page = params_.page_table[first + located.item.first_token / kPageTokens + lane_];
    }
    return located;
  }

  __device__ __forceinline__ ItemRecord* record(int slot) {
    return reinterpret_cast<ItemRecord*>(shared_ + Layout::kRecords) + slot;
  }

  __device__ __forceinline__ uint8_t* block(int page, int kv_head) const {
    return params_.layer_pool + int64_t{page} * params_.page_stride + int64_t{kv_head} * Traits::kBlockBytes;
  }

  __device__ __forceinline__ void announce(const Item& item, int last_page, uint32_t first_slot,
                                           const RingCursor& slot) {
    constexpr int kDim = Traits::kDim;
    barrier_wait(&barriers_.item_empty[slot.stage], slot.parity ^ 1);
    const bool newest = params_.append && item.piece == item.pieces - 1;
    *record(slot.stage) = {item, first_slot, newest ? block(last_page, item.kv_head) : nullptr};
    uint64_t* full = &barriers_.item_full[slot.stage];
    const int query_bytes = params_.group * kDim * 4;
    constexpr int kHeadBytes = kDim * 4;
    barrier_expect(full, query_bytes + kHeadBytes + (newest ? 2 * kHeadBytes : 0));
    const float* row = params_.qkv + int64_t{item.row} * (params_.heads + 2 * params_.kv_heads) * kDim;
    float* raw = reinterpret_cast<float*>(shared_ + Layout::raw(params_.group, slot.stage));
    bulk_copy_shared_data(raw, row + item.kv_head * params_.group * kDim, query_bytes, full);
    float* const keys = raw + params_.group * kDim;
    if (newest) {
      bulk_copy_shared_data(keys, row + (params_.heads + item.kv_head) * kDim, kHeadBytes, full);
      bulk_copy_shared_data(keys + kDim, row + (params_.heads + params_.kv_heads + item.kv_head) * kDim, kHeadBytes,
                            full);
    }
    const int64_t angles = int64_t{item.context - 1} * (kDim / 2);
    bulk_copy_shared_data(keys + 2 * kDim, params_.rope_cos + angles, kHeadBytes / 2, full);
    bulk_copy_shared_data(keys + 2 * kDim + kDim / 2, params_.rope_sin + angles, kHeadBytes / 2, full);
  }

  __device__ __forceinline__ void copy_slot(const Item& item, int page, int slot, const RingCursor& ring) {
    barrier_wait(&barriers_.slot_empty[ring.stage], ring.parity ^ 1);
    uint64_t* full = &barriers_.slot_full[ring.stage];
    uint8_t* target = shared_ + Layout::ring(params_.group) + ring.stage * Traits::kSlotBytes;
    const uint8_t* source = block(page, item.kv_head);
    barrier_expect(full, Traits::kSlotBytes);
    if constexpr (Traits::kBits == 4) {
      bulk_copy(target, source, Traits::kSlotBytes, full, policy_);
    } else {
      constexpr int kHalf = Bf16Block<Traits::kDim>::kSixteenTokens;
      source += (slot % 4) * kHalf;
      bulk_copy(target, source, kHalf, full, policy_);
      bulk_copy(target + kHalf, source + Bf16Block<Traits::kDim>::kValues, kHalf, full, policy_);
    }
  }

  const AttentionParams& params_;
  uint8_t* shared_;
  uint64_t policy_;
  int lane_;
  int row_slot_[2];
  AttentionBarriers& barriers_;
};

}  // namespace fut
