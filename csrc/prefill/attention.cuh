// Causal attention of packed prompts over paged BF16 history. A CTA is three warpgroups: in one, a warp fetches K and
// V, two fetch Q and one clears what belongs to no token; two multiply 64 rows each. Scores of a step are multiplied
// while the step before is multiplied with V; and the warpgroups take turns, so that the softmax of one runs under the
// products of the other.

#pragma once

#include "../ptx/dependency.cuh"
#include "../ptx/wgmma_registers.cuh"
#include "attention_fetch.cuh"
#include "attention_store.cuh"

namespace fut {

inline constexpr int kAttentionThreads = 128 * 3;
inline constexpr int kAttentionProducerRegisters = 56, kAttentionConsumerRegisters = 224;
inline constexpr int kTurnBarrier = 1;  // and the next: one a warpgroup

// Scores of 64 rows with a step's keys; or what became of them. See wgmma.cuh for what lies where.
using Scores = float[kAttentionKeys / 2];

// s = q k^T, issued as a group.
template <int kDim>
__device__ __forceinline__ void issue_scores(Scores& s, const uint8_t* q, const uint8_t* k) {
  using Layout = HeadLayout<kDim>;
  constexpr int kSlices = Layout::kRowBytes / 32;  // of 16 channels, of a block
  settle(s);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
    const int block = i / kSlices, slice = i % kSlices;
    wgmma(Bf16{}, s, swizzled_rows<Layout::kRowBytes>(q) + (block * 64 * Layout::kRowBytes >> 4) + 2 * slice,
          swizzled_rows<Layout::kRowBytes>(k) + (block * kAttentionKeys * Layout::kRowBytes >> 4) + 2 * slice, i > 0);
  }
  wgmma_commit();
}

// BF16 weights as the A operand of 16 keys each.
using Weights = uint32_t[kAttentionKeys / 16][4];

// o += p v, or o = p v, issued as a group.
template <int kDim>
__device__ __forceinline__ void issue_outputs(float (&o)[kDim / 2], const Weights& p, const uint8_t* v,
                                              bool accumulate) {
  using Layout = HeadLayout<kDim>;
  const uint64_t b = swizzled_columns<Layout::kRowBytes, kAttentionKeys * Layout::kRowBytes>(v);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kAttentionKeys / 16; ++i)
    wgmma_transposed(Bf16{}, o, p[i], b + (i * 16 * Layout::kRowBytes >> 4), accumulate || i > 0);
  wgmma_commit();
}

__device__ __forceinline__ void pack_weights(Weights& p, const Scores& s) {
#pragma unroll
  for (int i = 0; i < kAttentionKeys / 16; ++i)
#pragma unroll
    for (int r = 0; r < 4; ++r) p[i][r] = pack_bf16(s[8 * i + 2 * r], s[8 * i + 2 * r + 1]);
}

// The running softmax of a lane's two rows.
struct Softmax {
  float most[2];
  float sum[2];  // of this lane's keys

  // Hides keys past the rows' positions; `first` is the position of the step's first key.
  __device__ __forceinline__ static void hide(Scores& s, const int (&position)[2], int first, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int last = position[half] - first - 2 * (lane & 3);
#pragma unroll
      for (int j = 0; j < kAttentionKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * j + e > last) s[4 * j + 2 * half + e] = -INFINITY;
    }
  }

  // Turns scores into weights relative to the largest so far; what was summed before is to be multiplied by `rescale`.
  // Every row sees key 0 in its first step, so that its largest score is a number.
  template <bool kFirst>
  __device__ __forceinline__ void weigh(Scores& s, float scale_log2, float (&rescale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = kFirst ? -INFINITY : most[half];
#pragma unroll
      for (int j = 0; j < kAttentionKeys / 8; ++j)
        largest = fmaxf(largest, fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
      largest = reduce_quad(largest, [](float a, float b) { return fmaxf(a, b); });
      if constexpr (!kFirst) rescale[half] = exp2_fast((most[half] - largest) * scale_log2);
      most[half] = largest;
      const float shift = largest * scale_log2;
      float parts[2] = {0.f, 0.f};
#pragma unroll
      for (int j = 0; j < kAttentionKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * j + 2 * half + e];
          x = exp2_fast(fmaf(x, scale_log2, -shift));
          parts[e] += x;
        }
      sum[half] = (kFirst ? 0.f : sum[half] * rescale[half]) + (parts[0] + parts[1]);
    }
  }
};

// One warpgroup's part of tiles, and where it stands in the rings.
template <int kDim>
struct AttentionConsumer {
  AttentionShared<kDim>& shared;
  const AttentionParams& params;
  const int warpgroup, lane;
  HistoryPlace<kDim> k, v;
  uint32_t q_phase = 0;

  __device__ __forceinline__ void release(uint64_t* barrier) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  }

  // A step's scores are there: its K, and after the last step Q, may be fetched over.
  __device__ __forceinline__ void scored(bool last) {
    release(&shared.k.empty[k.stage]);
    if (last && lane == 0) barrier_arrive(&shared.q_empty[warpgroup]);
    k.advance();
  }

  // All of a tile's rows are the other warpgroup's.
  __device__ __forceinline__ void pass(int steps) {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      barrier_wait(&shared.k.full[k.stage], k.phase);
      release(&shared.k.empty[k.stage]);
      k.advance();
      barrier_wait(&shared.v.full[v.stage], v.phase);
      release(&shared.v.empty[v.stage]);
      v.advance();
    }
  }

  __device__ __forceinline__ void attend(const AttentionTile& tile) {
    const uint8_t* q = shared.q[warpgroup][0];
    const int steps = tile.steps;
    const bool in_turn = tile.rows > 64;
    const int row = tile.first + 64 * warpgroup + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4;
    const int position[2] = {tile.position + row / params.group, tile.position + (row + 8) / params.group};
    // Steps whose keys all rows see.
    const int whole = (tile.position + (tile.first + 64 * warpgroup) / params.group + 1) / kAttentionKeys;
    Softmax softmax;
    Scores s;
    Weights p;
    float o[kDim / 2], rescale[2];
    barrier_wait(&shared.q_full[warpgroup], q_phase);
    q_phase ^= 1;
    barrier_wait(&shared.k.full[k.stage], k.phase);
    issue_scores<kDim>(s, q, shared.k.data[k.stage][0]);
    wgmma_wait<0>();
    settle(s);
    scored(steps == 1);
    if (whole == 0) Softmax::hide(s, position, 0, lane);
    softmax.weigh<true>(s, params.scale_log2, rescale);
    pack_weights(p, s);
    if (steps > 1) barrier_wait(&shared.k.full[k.stage], k.phase);
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      if (in_turn) named_barrier<256>(kTurnBarrier + warpgroup);
      issue_scores<kDim>(s, q, shared.k.data[k.stage][0]);
      barrier_wait(&shared.v.full[v.stage], v.phase);
      settle(o);
      issue_outputs<kDim>(o, p, shared.v.data[v.stage][0], step > 1);
      if (in_turn) named_barrier_arrive<256>(kTurnBarrier + (warpgroup ^ 1));
      wgmma_wait<1>();
      settle(s);
      scored(step + 1 == steps);
      if (step >= whole) Softmax::hide(s, position, step * kAttentionKeys, lane);
      softmax.weigh<false>(s, params.scale_log2, rescale);
      settle(s);
      // The next step's keys are waited for here, since ptxas moves nothing across: the softmax stays under the
      // products with V instead of after them.
      if (step + 1 < steps) barrier_wait(&shared.k.full[k.stage], k.phase);
      wgmma_wait<0>();
      settle(o);
      settle(s);  // the weights' registers were being read until now
      release(&shared.v.empty[v.stage]);
      v.advance();
      pack_weights(p, s);
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) o[i] *= rescale[i / 2 % 2];
    }
    barrier_wait(&shared.v.full[v.stage], v.phase);
    settle(o);
    issue_outputs<kDim>(o, p, shared.v.data[v.stage][0], steps > 1);
    wgmma_wait<0>();
    settle(o);
    release(&shared.v.empty[v.stage]);
    v.advance();
    store_attention<kDim>(params, tile, row, o, softmax.sum, lane);
  }
};

template <int kDim>
__device__ __forceinline__ void attend_tiles(AttentionShared<kDim>& shared, const AttentionParams& p) {
  AttentionConsumer<kDim> consumer = {
      shared, p, static_cast<int>(threadIdx.x) / 128, static_cast<int>(threadIdx.x) % 32, {}, {}};
  // The first turn is the first warpgroup's.
  if (consumer.warpgroup == 1) named_barrier_arrive<256>(kTurnBarrier);
  RingPlace<kTileSlots> slot;
  for (;;) {
    barrier_wait(&shared.tile_full[slot.stage], slot.phase);
    const AttentionTile& tile = shared.tiles[slot.stage];
    if (tile.steps == 0) return;
    if (consumer.warpgroup == 1 && tile.rows <= 64)
      consumer.pass(tile.steps);
    else
      consumer.attend(tile);
    consumer.release(&shared.tile_empty[slot.stage]);
    slot.advance();
  }
}

template <int kDim>
__global__ __launch_bounds__(kAttentionThreads,
                             1) void prefill_attention(const __grid_constant__ CUtensorMap map_k,
                                                       const __grid_constant__ CUtensorMap map_v,
                                                       const __grid_constant__ AttentionParams params) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<AttentionShared<kDim>*>(dynamic_shared);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&map_k);
    prefetch_tensor_map(&map_v);
    shared.init();
    fence_barrier_init();
  }
  __syncthreads();
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (warp >= 8) {
    fewer_registers<kAttentionProducerRegisters>();
    if (warp == 8) fetch_history(shared, &map_k, &map_v, params, lane);
    if (warp == 9 || warp == 10) fetch_queries(shared, params, warp - 9, lane);
    if (warp == 11) clear_tails(shared, lane);
  } else {
    more_registers<kAttentionConsumerRegisters>();
    attend_tiles(shared, params);
  }
}

}  // namespace fut
