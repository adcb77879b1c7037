// The producer warp of the attention kernel: finds the work items, hands them out, and keeps the ring of cache blocks
// filled.

#pragma once

#include "../ptx/bulk_copy.cuh"
#include "../ptx/dependency.cuh"
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
        found_{},
        barriers_(*reinterpret_cast<AttentionBarriers*>(shared + Layout::kBarriers)) {}

  __device__ void run() {
    const bool ahead = params_.cache_ready;
    if (!ahead) start();
    const int total = list_rows(rows(), params_.position, params_.slot, params_.rows, params_.kv_heads, lane_);
    const int cta = static_cast<int>(blockIdx.x);
    const int ctas = static_cast<int>(gridDim.x);
    first_ = first_item(rows(), total, params_.kv_heads, cta, ctas);
    end_ = first_item(rows(), total, params_.kv_heads, cta + 1, ctas);
    uint32_t items = 0;
    uint32_t slots_passed = 0;
    Located next = locate(0);
    while (next.item.pieces != 0) {
      const Located now = next;
      next = locate(items + 1);
      const int slots = (now.item.tokens + Traits::kSlotTokens - 1) / Traits::kSlotTokens;
      int issued = 0;
      if (items == 0 && ahead) {
        // The cache may be read before the kernel before has finished, the item's queries may not.
        issued = min(slots, min(1 << params_.ring_shift, 32));
        copy_slots(now, 0, issued, slots_passed);
        start();
      }
      announce(now, slots_passed, items);
      while (issued < slots) {
        const int count = min(slots - issued, 32);
        copy_slots(now, issued, count, slots_passed);
        issued += count;
      }
      ++items;
      slots_passed += slots;
    }
    if (items == 0 && ahead) start();
    if (lane_ == 0) {
      barrier_wait(&barriers_.item_empty[items % kItemSlots], items / kItemSlots & 1 ^ 1);
      record(items).item.pieces = 0;
      barrier_arrive(&barriers_.item_full[items % kItemSlots]);
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

  __device__ __forceinline__ RowEntry* rows() const { return reinterpret_cast<RowEntry*>(shared_ + Layout::kRows); }

  __device__ __forceinline__ ItemRecord& record(uint32_t index) const {
    return reinterpret_cast<ItemRecord*>(shared_ + Layout::kRecords)[index % kItemSlots];
  }

  __device__ __forceinline__ uint8_t* block(int page, int kv_head) const {
    return params_.layer_pool + int64_t{page} * params_.page_stride + int64_t{kv_head} * Traits::kBlockBytes;
  }

  // This CTA's item `sequence`, or one of no pieces after the last. The lanes find 32 items at a time, and an item's
  // pages are looked up while the item before it is still being copied: one warp does all of this, and must not be what
  // the others wait for.
  __device__ __forceinline__ Located locate(uint32_t sequence) {
    if (sequence % 32 == 0) {
      const int index = first_ + static_cast<int>(sequence) + lane_;
      found_ = Item{};
      if (index < end_) found_ = find_item(rows(), index, first_, end_, params_.kv_heads);
    }
    const int owner = static_cast<int>(sequence % 32);
    Located located{};
    located.item.row = __shfl_sync(~0u, found_.row, owner);
    located.item.kv_head = __shfl_sync(~0u, found_.kv_head, owner);
    located.item.piece = __shfl_sync(~0u, found_.piece, owner);
    located.item.pieces = __shfl_sync(~0u, found_.pieces, owner);
    located.item.first_token = __shfl_sync(~0u, found_.first_token, owner);
    located.item.tokens = __shfl_sync(~0u, found_.tokens, owner);
    located.item.context = __shfl_sync(~0u, found_.context, owner);
    located.item.run = __shfl_sync(~0u, found_.run, owner);
    located.item.ends = __shfl_sync(~0u, static_cast<int>(found_.ends), owner) != 0;
    if (lane_ * kPageTokens < located.item.tokens) {
      const int64_t row = int64_t{rows()[located.item.row].slot} * params_.table_width;
      located.page = params_.page_table[row + located.item.first_token / kPageTokens + lane_];
    }
    return located;
  }

  // Hands an item to the other warps. They read its queries themselves: for the little that they are, the copy engine
  // takes longer to answer than the L2.
  __device__ __forceinline__ void announce(const Located& located, uint32_t first_slot, uint32_t index) {
    const Item& item = located.item;
    const bool newest = params_.append && item.piece == item.pieces - 1;
    const int last_page = __shfl_sync(~0u, located.page, (item.tokens - 1) / kPageTokens);
    if (lane_ == 0) {
      barrier_wait(&barriers_.item_empty[index % kItemSlots], index / kItemSlots & 1 ^ 1);
      record(index) = {item, first_slot, newest ? block(last_page, item.kv_head) : nullptr};
      barrier_arrive(&barriers_.item_full[index % kItemSlots]);
    }
    __syncwarp();
  }

  // Copies slots first .. first + count - 1 of an item, at most 32, lane l the l-th: each works out its addresses at
  // once, and they take turns waiting for their slots.
  __device__ __forceinline__ void copy_slots(const Located& located, int first, int count, uint32_t slots_passed) {
    const int slot = first + lane_;
    const RingPlace ring(slots_passed + slot, params_.ring_shift);
    const int page = __shfl_sync(~0u, located.page, slot * Traits::kSlotTokens / kPageTokens);
    uint64_t* const full = &barriers_.slot_full[ring.stage];
    uint8_t* const target = shared_ + Layout::ring(params_.group) + ring.stage * Traits::kSlotBytes;
    const uint8_t* const source = block(page, located.item.kv_head);
    for (int turn = 0; turn < count; ++turn) {
      if (turn == lane_) {
        barrier_wait(&barriers_.slot_empty[ring.stage], ring.parity ^ 1);
        barrier_expect(full, Traits::kSlotBytes);
        if constexpr (Traits::kBits == 4) {
          bulk_copy(target, source, Traits::kSlotBytes, full, policy_);
        } else {
          constexpr int kHalf = Bf16Block<Traits::kDim>::kSixteenTokens;
          const uint8_t* const sixteen = source + slot % 4 * kHalf;
          bulk_copy(target, sixteen, kHalf, full, policy_);
          bulk_copy(target + kHalf, sixteen + Bf16Block<Traits::kDim>::kValues, kHalf, full, policy_);
        }
      }
      // Waiting out of turn could take a slot's use before last for its last one.
      __syncwarp();
    }
  }

  const AttentionParams& params_;
  uint8_t* shared_;
  uint64_t policy_;
  int lane_;
  Item found_;               // lane l: item l of the 32 found last
  int first_ = 0, end_ = 0;  // this CTA's items
  AttentionBarriers& barriers_;
};

}  // namespace fut
