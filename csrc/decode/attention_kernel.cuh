// The attention kernel. A producer warp keeps a ring of cache blocks filled by bulk copies; the other warps attend.
//
// A CTA takes neighbouring work items. Where a run of pieces of one (row, KV head) begins, its warps prepare the
// queries of the KV head's group; where an item holds the newest token, they append its K and V. They go through the
// units of a piece in turn and merge their sums. Where a context has several pieces, the merged sums go to the
// workspace, and at the end of a run the last warp to arrive at a (row, head) merges them in the order of the pieces.

#pragma once

#include "../ptx/thread.cuh"
#include "attention_bf16.cuh"
#include "attention_int4.cuh"
#include "attention_layout.cuh"
#include "attention_merge.cuh"
#include "attention_producer.cuh"
#include "attention_unit.cuh"
#include "head_vector.cuh"
#include "kv_append.cuh"

namespace fut {

// Turns one head's query into its column of the B operand. In INT4 mode the operand is FP16, for the codes are: q is
// rounded to BF16 first and multiplied by a power of two that brings its largest element to [2^8, 2^9), so that FP16
// holds it exactly down to 2^-22 of that element.
template <class Traits>
__device__ __forceinline__ void prepare_query(const AttentionParams& params, const float* raw, const float* cosine,
                                              const float* sine, int head, uint8_t* fragments, float2* constants,
                                              int lane) {
  constexpr int kDim = Traits::kDim;
  constexpr int kExponent = 8;
  HeadVector<kDim> query = turned_head<kDim>(raw, params.q_norm, params.eps, cosine, sine, lane);
  float factor = 1.0f;
  float sum = 0.0f;
  if constexpr (Traits::kBits == 4) {
    if (params.rotation) rotate_head<kDim>(query, lane);
    float largest = 0.0f;
#pragma unroll
    for (int e = 0; e < HeadVector<kDim>::kPerLane; ++e) {
      query.x[e] = round_bf16(query.x[e]);
      largest = fmaxf(largest, fabsf(query.x[e]));
    }
    factor = power_of_two_factor(warp_max(largest), kExponent);
  }
#pragma unroll
  for (int e = 0; e < HeadVector<kDim>::kPerLane; ++e) {
    if (!HeadVector<kDim>::has(e, lane)) continue;
    const int dim = lane + 32 * e;
    const int owner = 4 * (head & 7) + (dim >> 1 & 3);
    uint8_t* const words = fragments + QueryFragments<kDim, Traits::kHeadTiles>::words(dim >> 4, head >> 3, owner);
    uint16_t& place = reinterpret_cast<uint16_t*>(words)[2 * (dim >> 3 & 1) + (dim & 1)];
    if constexpr (Traits::kBits == 4) {
      const float scaled = query.x[e] * factor;
      sum += scaled;
      place = __half_as_ushort(__float2half_rn(scaled));
    } else {
      place = __bfloat16_as_ushort(__float2bfloat16_rn(query.x[e]));
    }
  }
  sum = warp_sum(sum);
  if (lane == 0) constants[head] = {sum, params.score_scale / factor};
}

template <class Traits>
class AttentionConsumer {
 public:
  static constexpr int kDim = Traits::kDim;
  static constexpr int kWarps = Traits::kWarps;

  using Layout = SharedLayout<Traits>;

  __device__ AttentionConsumer(const AttentionParams& params, uint8_t* shared)
      : params_(params),
        shared_(shared),
        barriers_(*reinterpret_cast<AttentionBarriers*>(shared + Layout::kBarriers)) {}

  __device__ void run() {
    for (;;) {
      const uint32_t begun = items_passed();
      barrier_wait(&barriers_.item_full[begun % kItemSlots], begun / kItemSlots & 1);
      if (record(begun).item.pieces == 0) break;
      if (record(begun).item.run == 1 || record(begun).append_block != nullptr) {
        prepare(record(begun));
        synchronize();
      }
      RunningSums<kDim, Traits::kHeadTiles> sums;
      attend(record(begun), sums);
      const uint32_t attended = items_passed();
      merge(record(attended).item, sums);
      __syncwarp();
      if (this_lane() == 0) {
        barrier_arrive(&barriers_.item_empty[attended % kItemSlots]);
        items_passed() = attended + 1;
      }
      __syncwarp();
    }
  }

 private:
  // Read anew wherever they are asked for, so that neither they nor what follows from them take registers all along.
  __device__ __forceinline__ static uint32_t thread() { return thread_read_anew(); }
  __device__ __forceinline__ static int warp() { return static_cast<int>(thread() >> 5); }
  __device__ __forceinline__ static int this_lane() { return static_cast<int>(thread() & 31); }

  __device__ __forceinline__ static void synchronize() { named_barrier<32 * kWarps>(1); }

  // The warp's count of items; it waits in shared memory while the units need the registers.
  __device__ __forceinline__ volatile uint32_t& items_passed() const {
    return reinterpret_cast<uint32_t*>(shared_ + Layout::kItemsPassed)[warp()];
  }

  __device__ __forceinline__ const ItemRecord& record(uint32_t index) const {
    return reinterpret_cast<const ItemRecord*>(shared_ + Layout::kRecords)[index % kItemSlots];
  }

  __device__ __forceinline__ NewestToken<kDim>& newest() const {
    return *reinterpret_cast<NewestToken<kDim>*>(shared_ + Layout::kNewest);
  }

  // Queries where a run begins, and K and V of the newest token, spread over the warps.
  __device__ __forceinline__ void prepare(const ItemRecord& record) {
    const int group = params_.group;
    const int lane = this_lane();
    const Item& item = record.item;
    const float* const raw = params_.qkv + int64_t{item.row} * (params_.heads + 2 * params_.kv_heads) * kDim;
    const float* const queries = raw + item.kv_head * group * kDim;
    const float* const keys = raw + (params_.heads + item.kv_head) * kDim;
    const int64_t angles = int64_t{item.context - 1} * (kDim / 2);
    const float* const cosine = params_.rope_cos + angles;
    const float* const sine = params_.rope_sin + angles;
    const int first = item.run == 1 ? 0 : group;
    const int tasks = group + (record.append_block != nullptr ? 2 : 0);
    for (int task = first + warp(); task < tasks; task += kWarps) {
      if (task < group) {
        prepare_query<Traits>(params_, queries + task * kDim, cosine, sine, task, shared_ + Layout::kQuery,
                              reinterpret_cast<float2*>(shared_ + Layout::kHeads), lane);
      } else {
        const int which = task - group;
        prepare_newest<kDim, Traits::kBits>(newest(), which, keys + which * params_.kv_heads * kDim, params_.k_norm,
                                            params_.eps, cosine, sine, params_.rotation, params_.zero_point, lane);
        store_newest<kDim, Traits::kBits>(record.append_block, newest(), which, (item.context - 1) % kPageTokens, lane);
      }
    }
  }

  __device__ __forceinline__ void attend(const ItemRecord& record, RunningSums<kDim, Traits::kHeadTiles>& sums) {
    const int lane = this_lane();
    const QueryFragments<kDim, Traits::kHeadTiles> query(
        shared_ + Layout::kQuery, reinterpret_cast<const float2*>(shared_ + Layout::kHeads), lane);
    sums.clear(Traits::kBits == 4 ? kFirstValueFactor : 1.0f);

    // A warp visits the slots that hold its units; in INT4 mode two warps share a slot. `left` counts from the unit's
    // first token to the end of the piece.
    const int unit = warp();
    const int within_slot = unit % Traits::kUnitsPerSlot * Traits::kUnitTokens;
    int left = record.item.tokens - unit * Traits::kUnitTokens;
    uint32_t slot = record.first_slot + unit / Traits::kUnitsPerSlot;
    while (left + within_slot > 0) {
      const RingPlace ring(slot, params_.ring_shift);
      uint8_t* block = shared_ + Layout::ring(params_.group) + ring.stage * Traits::kSlotBytes;
      // A warp skips the slots of the others, and copies may overtake each other: the slot's last use may not have
      // arrived yet, and the use before that has the parity waited for. Once the last use has been given back, it has;
      // and that one is tested rightly, since a ring of kSlotStep slots or more has issued it by now.
      barrier_wait(&barriers_.slot_empty[ring.stage], ring.parity ^ 1);
      barrier_wait(&barriers_.slot_full[ring.stage], ring.parity);
      if (left > 0) {
        if (left <= Traits::kUnitTokens) patch(record, block);
        if constexpr (Traits::kBits == 4) {
          Int4Unit<kDim, Traits::kHeadTiles>::attend(block, within_slot / Traits::kUnitTokens, left, lane, query, sums);
        } else {
          Bf16Unit<kDim, Traits::kHeadTiles>::attend(block, left, lane, query, sums);
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&barriers_.slot_empty[RingPlace(slot, params_.ring_shift).stage]);
      left -= kWarps * Traits::kUnitTokens;
      slot += Traits::kSlotStep;
    }
  }

  // For the unit that ends the piece: the copy of the block was made before the newest token was written.
  __device__ __forceinline__ void patch(const ItemRecord& record, uint8_t* block) {
    if (record.append_block == nullptr) return;
    const int lane = this_lane();
    const int token = (record.item.context - 1) % kPageTokens;
    if constexpr (Traits::kBits == 4) {
#pragma unroll
      for (int which = 0; which < 2; ++which) store_newest<kDim, 4>(block, newest(), which, token, lane);
    } else {
      store_newest_sixteen<kDim>(block, newest(), token % 16, lane);
    }
    fence_async_proxy();
    __syncwarp();
  }

  __device__ __forceinline__ void merge(const Item& item, RunningSums<kDim, Traits::kHeadTiles>& sums) {
    float* const merge_out = reinterpret_cast<float*>(shared_ + Layout::kMerge);
    float2* const merge_sums = reinterpret_cast<float2*>(shared_ + Layout::kMergeSums);
    const int part = warp();
    const int lane = this_lane();
    const int row_heads = Layout::merge_heads(params_.group);
    const float value_scale = 1.0f / sums.value_factor;
#pragma unroll
    for (int n = 0; n < Traits::kHeadTiles; ++n) {
      synchronize();  // what was merged before has been read
      const int heads = min(params_.group - Traits::kMergeHeads * n, Traits::kMergeHeads);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int head = 2 * (lane & 3) + h;
        const float total = token_sum(sums.total[n][h]);
        const float shift = Traits::kBits == 4 ? token_sum(sums.shift[n][h]) : 0.0f;
        if (head < heads) {
          float* const out = merge_out + (part * row_heads + head) * Traits::kMergeRow + (lane >> 2);
#pragma unroll
          for (int c = 0; c < Traits::kTiles; ++c) {
            out[16 * c] = fmaf(sums.out[c][n][h], value_scale, shift);
            out[16 * c + 8] = fmaf(sums.out[c][n][h + 2], value_scale, shift);
          }
          if (lane < 4) merge_sums[part * Traits::kMergeHeads + head] = {sums.top[n][h], total};
        }
      }
      synchronize();
      for (int head = warp(); head < heads; head += kWarps) {
        const SharedPartials<kDim> partials{merge_out + head * Traits::kMergeRow, row_heads * Traits::kMergeRow,
                                            merge_sums + head, Traits::kMergeHeads};
        MergedHead<kDim> merged = merge_head<kDim>(partials, kWarps, lane);
        finish(item, item.kv_head * params_.group + Traits::kMergeHeads * n + head, merged, lane);
      }
    }
  }

  // One warp, with the sums of an item for one head.
  __device__ __forceinline__ void finish(const Item& item, int head, MergedHead<kDim>& merged, int lane) {
    const int64_t row_head = int64_t{item.row} * params_.heads + head;
    if (item.pieces > 1) {
      const int64_t base = row_head * params_.max_pieces;
      float* const out = params_.piece_out + (base + item.piece) * kDim;
#pragma unroll
      for (int e = 0; e < HeadVector<kDim>::kPerLane; ++e) {
        if (HeadVector<kDim>::has(e, lane)) out[lane + 32 * e] = merged.out.x[e];
      }
      if (lane == 0) params_.piece_sums[base + item.piece] = {merged.top, merged.total};
      if (!item.ends) return;
      __syncwarp();
      // A run of all pieces was written by this warp alone.
      if (item.run < item.pieces) {
        uint32_t* const arrived = &params_.arrived[row_head];
        uint32_t before = 0;
        if (lane == 0) before = arrive(arrived, item.run);
        if (__shfl_sync(~0u, before, 0) + item.run != static_cast<uint32_t>(item.pieces)) return;
        if (lane == 0) *arrived = 0;
      }
      const GlobalPartials<kDim> partials{params_.piece_out + base * kDim, params_.piece_sums + base};
      merged = merge_head<kDim>(partials, item.pieces, lane);
    }
    const float inverse = __fdiv_rn(1.0f, merged.total);
#pragma unroll
    for (int e = 0; e < HeadVector<kDim>::kPerLane; ++e) merged.out.x[e] *= inverse;
    if (Traits::kBits == 4 && params_.rotation) rotate_head<kDim>(merged.out, lane);
#pragma unroll
    for (int e = 0; e < HeadVector<kDim>::kPerLane; ++e) {
      if (HeadVector<kDim>::has(e, lane)) {
        params_.out[row_head * kDim + lane + 32 * e] = __float2bfloat16_rn(merged.out.x[e]);
      }
    }
  }

  const AttentionParams& params_;
  uint8_t* shared_;
  AttentionBarriers& barriers_;
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 2) attend_kernel(const __grid_constant__ AttentionParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  using Layout = SharedLayout<Traits>;
  let_next_kernel_start();
  auto& barriers = *reinterpret_cast<AttentionBarriers*>(shared + Layout::kBarriers);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 1 << params.ring_shift; ++i) {
      barrier_init(&barriers.slot_full[i], 1);
      barrier_init(&barriers.slot_empty[i], Traits::kUnitsPerSlot);
    }
    for (int i = 0; i < kItemSlots; ++i) {
      barrier_init(&barriers.item_full[i], 1);
      barrier_init(&barriers.item_empty[i], Traits::kWarps);
    }
    fence_barrier_init();
  }
  // Columns of heads that do not exist stay zero.
  constexpr int kQueryWords = QueryFragments<Traits::kDim, Traits::kHeadTiles>::kBytes / 4;
  for (int i = threadIdx.x; i < kQueryWords; i += Traits::kThreads) {
    reinterpret_cast<uint32_t*>(shared + Layout::kQuery)[i] = 0;
  }
  if (threadIdx.x < Traits::kWarps) reinterpret_cast<uint32_t*>(shared + Layout::kItemsPassed)[threadIdx.x] = 0;
  for (int i = threadIdx.x; i < Traits::kHeadTiles * 8; i += Traits::kThreads) {
    reinterpret_cast<float2*>(shared + Layout::kHeads)[i] = {0.0f, 0.0f};
  }
  __syncthreads();
  if (threadIdx.x >= 32 * Traits::kWarps) {
    AttentionProducer<Traits>(params, shared).run();
  } else {
    wait_for_previous_kernel();
    AttentionConsumer<Traits>(params, shared).run();
  }
}

// Writes K and V of all rows, for chunks: a warp for each of K and V of a (row, KV head).
template <int kDim, int kBits>
__global__ void __launch_bounds__(64) append_kernel(const __grid_constant__ AttentionParams params) {
  __shared__ NewestToken<kDim> newest;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int lane = threadIdx.x & 31;
  const int which = threadIdx.x >> 5;
  const int row = blockIdx.x / params.kv_heads;
  const int kv_head = blockIdx.x % params.kv_heads;
  const int position = params.position[row];
  if (position < 0) return;
  const float* raw =
      params.qkv +
      (int64_t{row} * (params.heads + 2 * params.kv_heads) + params.heads + which * params.kv_heads + kv_head) * kDim;
  const int64_t angles = int64_t{position} * (kDim / 2);
  prepare_newest<kDim, kBits>(newest, which, raw, params.k_norm, params.eps, params.rope_cos + angles,
                              params.rope_sin + angles, params.rotation, params.zero_point, lane);
  constexpr int64_t kBytes = kBits == 4 ? Int4Block<kDim>::kBytes : Bf16Block<kDim>::kBytes;
  const int64_t entry = int64_t{params.slot[row]} * params.table_width + position / kPageTokens;
  uint8_t* block = params.layer_pool + int64_t{params.page_table[entry]} * params.page_stride + kv_head * kBytes;
  store_newest<kDim, kBits>(block, newest, which, position % kPageTokens, lane);
}

}  // namespace fut
