// y = W x for 1 to 32 tokens: decode's matrix products, fed by a ring of bulk copies.
//
// The weights stand on the A operand of mma.sync.m16n8k16 (16 output rows), the tokens on its 8 columns. K is always
// summed in kSlices slices, each in the order of its groups, and the slices in the order of their numbers, so that a
// token's result does not depend on how many tokens share the launch or how the work is spread over the card.
//
// A cluster of C CTAs takes the same rows and shares K out: each CTA holds the activations of kSlices / C slices in
// shared memory and works on C groups of rows at once, a warp a slice and group. Every warp has its own ring of weights
// in shared memory, which it fills by itself: no two warps wait for each other before a window of rows is complete.

#pragma once

#include <cstdint>

#include "../fut.h"
#include "../ptx/bulk_copy.cuh"
#include "../ptx/dependency.cuh"
#include "../ptx/thread.cuh"
#include "activation_stage.cuh"
#include "projection_finish.cuh"
#include "projection_multiply.cuh"
#include "projection_params.cuh"
#include "weight_stream.cuh"

namespace fut {

template <int kFormat, int kGroup, int kTokenTiles, int kRowTiles>
__global__ void __launch_bounds__(kProjectionThreads, kTokenTiles == 1 ? 2 : 1) project(const ProjectionParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int cluster = p.cluster, local_slices = kSlices / cluster;
  const int rank = blockIdx.x % cluster, cluster_id = blockIdx.x / cluster, clusters = gridDim.x / cluster;
  const ProjectionLayout at(p, kFormat, kGroup, kTokenTiles, kRowTiles);
  uint64_t* barriers = reinterpret_cast<uint64_t*>(shared + at.barriers);
  uint64_t* slot_full = barriers + kProjectionWarps * p.stages;
  uint64_t* slot_free = slot_full + p.slots;  // [slot][CTA of the cluster that finishes the rows]
  float* partial = reinterpret_cast<float*>(shared + at.partial);
  const int first = static_cast<int>(static_cast<int64_t>(p.tiles) * cluster_id / clusters);
  const int end = static_cast<int>(static_cast<int64_t>(p.tiles) * (cluster_id + 1) / clusters);
  const int tiles_a_round = cluster * kRowTiles;

  if (threadIdx.x == 0) {
    for (int s = 0; s < p.slots; ++s) {
      barrier_init(slot_full + s, cluster == 1 ? kSlices : 1);
      for (int c = 0; c < cluster; ++c) barrier_init(slot_free + s * cluster + c, 1);
    }
    for (int s = 0; s < kProjectionWarps * p.stages; ++s) barrier_init(barriers + s, 1);
    fence_barrier_init();
  }
  if (cluster == 1)
    __syncthreads();
  else
    cluster_sync_relaxed();

  if (warp == kProjectionWarps) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    // In every round this CTA finishes the row tiles of one group, whose eight slices come from all CTAs of the
    // cluster.
    const int row_tile_bytes = kSlices * ((p.tokens + 1) / 2) * 8 * 16;  // what the lanes with tokens send
    const auto expect = [&](int tile, int slot) {
      if (cluster > 1 && lane == 0 && tile < end)
        barrier_expect(slot_full + slot, min(kRowTiles, end - tile) * row_tile_bytes);
    };
    int tile = first + rank * kRowTiles;
    for (int s = 0; s < p.slots; ++s) expect(tile + s * tiles_a_round, s);
    int slot = 0, parity = 0;
    for (; tile < end; tile += tiles_a_round) {
      finish_round<kTokenTiles, kRowTiles>(p, partial + slot * at.slot_floats, slot_full + slot, parity, tile,
                                           min(kRowTiles, end - tile), lane);
      __syncwarp();
      // Only who will wait is told: nothing may reach a CTA that has left.
      const int next = tile + p.slots * tiles_a_round;
      if (next < end) {
        expect(next, slot);
        __syncwarp();
        if (lane < cluster) cluster_arrive(cluster_address(slot_free + slot * cluster + rank, lane));
      }
      if (++slot == p.slots) {
        slot = 0;
        parity ^= 1;
      }
    }
  } else {
    // Weights depend on nothing: they may come while the kernel before still runs.
    const int local_slice = warp % local_slices, row_group = warp / local_slices;
    const int slice = rank * local_slices + local_slice;
    const int x_begin = p.slice_begin(rank * local_slices);
    const int k_begin = p.slice_begin(slice), offset = k_begin - x_begin, x_end = p.slice_begin(slice + 1),
              k_end = min(x_end, p.stored_cols);
    uint64_t* full = barriers + warp * p.stages;
    WeightStream<kFormat, kGroup, kRowTiles> stream(
        p, shared + at.ring + warp * p.stages * stage_bytes(kFormat, kGroup, kRowTiles), full,
        first + row_group * kRowTiles, end, tiles_a_round, k_begin, k_end - k_begin, lane);
    for (int s = 0; s < p.stages && stream.more(); ++s) stream.fetch();
    const int chunks = (x_end - k_begin) / 8;
    fetch_gains(p, k_begin, chunks, lane);
    let_next_kernel_start();
    wait_for_previous_kernel();

    uint8_t* x = shared + at.x;
    float* corrections = reinterpret_cast<float*>(shared + at.corrections);
    float* factors = reinterpret_cast<float*>(shared + at.factors) + local_slice * kMostTokens;
    float* row_factors = reinterpret_cast<float*>(shared + at.row_factors);
    for (int token = row_group; token < p.tokens; token += cluster)
      fetch_activations(p, token, k_begin, chunks, x + token * at.x_pitch + 2 * offset, lane);
    if (p.square_sums != nullptr) {
      reduce_row_factors(p, row_factors, warp, lane);
      named_barrier<32 * kProjectionWarps>(1);
    }
    cp_async_wait();
    __syncwarp();
    convert_slice<kFormat, kGroup, kTokenTiles>(p,
                                                {x + 2 * offset, corrections + offset / kGroup * (8 * kTokenTiles),
                                                 factors, row_factors, at.x_pitch, k_begin, chunks, row_group, cluster},
                                                lane);
    if (cluster == 1)
      __syncwarp();
    else
      named_barrier<32 * kProjectionWarps>(1);

    // Read anew: nothing that follows from it is kept while the activations are converted.
    const int lane = static_cast<int>(thread_read_anew() & 31), g = lane >> 2, t = lane & 3;
    int x_row[kTokenTiles];
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) x_row[j] = (8 * j + g < p.tokens ? 8 * j + g : 0) * at.x_pitch;
    const int slice_floats = (slice * kRowTiles * kTokenTiles * kLanes + lane) * 4;
    const auto their_slots = cluster_address(partial, row_group), their_full = cluster_address(slot_full, row_group);
    int stage = 0, parity = 0, slot = 0, slot_parity = 1;
    for (int tile = first + row_group * kRowTiles; tile < end; tile += tiles_a_round) {
      Accumulator<kTokenTiles> sum[kRowTiles] = {};
      for (int done = 0; done < stream.columns; done += chunk_cols(kFormat, kRowTiles)) {
        barrier_wait(full + stage, parity);
        const int width = min(chunk_cols(kFormat, kRowTiles), stream.columns - done);
        const uint8_t* data = stream.ring + stage * stage_bytes(kFormat, kGroup, kRowTiles);
        if constexpr (kFormat == FUT_INT4)
          multiply_int4<kGroup, kTokenTiles, kRowTiles>(data, p.scale_is_fp16, x, x_row, corrections, offset + done,
                                                        width, lane, sum);
        else
          multiply_rows<kFormat, kTokenTiles, kRowTiles>(data, x, x_row, offset + done, width, lane, sum);
        __syncwarp();
        if (stream.more()) stream.fetch();
        if (++stage == p.stages) {
          stage = 0;
          parity ^= 1;
        }
      }
      // The first time round every slot is free: a barrier that never completed a phase passes the other parity.
      barrier_wait(slot_free + slot * cluster + row_group, slot_parity);
      const int slot_floats = slot * at.slot_floats + slice_floats;
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j) {
        const int token = 8 * j + 2 * t;
        if (token >= p.tokens) continue;
        const float back[2] = {factors[token], factors[min(token + 1, p.tokens - 1)]};
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          if (kRowTiles > 1 && tile + r >= end) continue;
          const int place = slot_floats + (r * kTokenTiles + j) * kLanes * 4;
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[r][j][i] *= back[i & 1];
          if (cluster == 1)
            *reinterpret_cast<float4*>(partial + place) =
                make_float4(sum[r][j][0], sum[r][j][1], sum[r][j][2], sum[r][j][3]);
          else
            cluster_store(their_slots + 4 * place, sum[r][j], their_full + 8 * slot);
        }
      }
      if (cluster == 1) {
        __syncwarp();
        if (lane == 0) barrier_arrive(slot_full + slot);
      }
      if (++slot == p.slots) {
        slot = 0;
        slot_parity ^= 1;
      }
    }
  }
}

}  // namespace fut
