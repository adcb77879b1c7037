// The GEMM: C = A B^T, A [m, k] and B [n, k] of one type, by persistent CTAs of three warpgroups. One warp fetches
// stages of both through the copy engine, three others the factors of rows and columns; two warpgroups multiply 64 rows
// each and finish their own rows. CTAs of a cluster lie one below the other: each fetches half of B's rows for both.

#pragma once

#include "../ptx/dependency.cuh"
#include "../ptx/tensor_copy.cuh"
#include "epilogue.cuh"
#include "mainloop.cuh"

namespace fut {

inline constexpr int kConsumers = 2;  // warpgroups
inline constexpr int kGemmThreads = 128 * (kConsumers + 1);
// 65536 registers for three warpgroups; the kernel starts with a third of them each.
inline constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

template <int kTileN, class Params>
struct __align__(1024) GemmShared {
  GemmRing<kTileN> ring;
  TileVectors<kTileN> vectors[2];
  uint64_t vectors_full[2], vectors_empty[2];
  uint64_t turn[2];  // the other warpgroup has waited for all of its tile's stages
  Params params;     // of the epilogue: read from here, they take no registers during the mainloop
};

// Tiles of one CTA, the same for all its warps. `rank`: the CTA's place in its cluster.
struct TileWalk {
  int next, count, stride, rank;

  // Every `every`-th of them, from the `first` on.
  __device__ __forceinline__ explicit TileWalk(const GemmShape& shape, int rank, int first = 0, int every = 1)
      : next(static_cast<int>(blockIdx.x + first * gridDim.x) / shape.cluster),
        count(shape.order.count()),
        stride(static_cast<int>(gridDim.x) / shape.cluster * every),
        rank(rank) {}
  __device__ __forceinline__ bool take(const GemmShape& shape, int& row0, int& column0) {
    if (next >= count) return false;
    const TileOrder::Place place = shape.order.at(next);
    row0 = (place.row * shape.cluster + rank) * kGemmTileM;
    column0 = place.column * shape.step;
    next += stride;
    return true;
  }
};

// One thread. A stage of B is fetched in halves: of a cluster's CTAs each fetches one for both.
template <class Element, int kTileN>
__device__ __forceinline__ void fetch_operands(GemmRing<kTileN>& ring, const CUtensorMap* map_a,
                                               const CUtensorMap* map_b, const GemmShape& shape, int rank) {
  constexpr int kStageElements = kGemmStageBytes / Element::kBytes;
  constexpr uint32_t kBytes = (kGemmTileM + kTileN) * kGemmStageBytes;
  constexpr int kHalf = kTileN / 2;
  RingPlace<GemmRing<kTileN>::kStages> place;
  TileWalk walk(shape, rank);
  for (int row0, column0; walk.take(shape, row0, column0);) {
    for (int s = 0; s < shape.stages; ++s) {
      barrier_wait(&ring.empty[place.stage], place.phase ^ 1);
      uint64_t* full = &ring.full[place.stage];
      barrier_expect(full, kBytes);
      const int k = s * kStageElements;
      tensor_copy(ring.a[place.stage], map_a, k, row0, full);
      uint8_t* b = ring.b[place.stage];
      if (shape.cluster == 1) {
        tensor_copy(b, map_b, k, column0, full);
        tensor_copy(b + kHalf * kGemmStageBytes, map_b, k, column0 + kHalf, full);
      } else {
        tensor_copy_multicast(b + rank * kHalf * kGemmStageBytes, map_b, k, column0 + rank * kHalf, full, 3);
      }
      place.advance();
    }
  }
}

// One of kVectorWarps warps.
template <int kTileN, class Params>
__device__ __forceinline__ void fetch_vectors(GemmShared<kTileN, Params>& shared, const GemmScales& scales,
                                              const GemmShape& shape, int rank, int warp, int lane) {
  RingPlace<2> place;
  TileWalk walk(shape, rank);
  for (int row0, column0; walk.take(shape, row0, column0);) {
    barrier_wait(&shared.vectors_empty[place.stage], place.phase ^ 1);
    if (warp < kRowVectorWarps)
      fetch_row_vectors(shared.vectors[place.stage], scales, row0, shape.m, warp, lane);
    else
      fetch_column_vectors(shared.vectors[place.stage], scales, column0, shape.n, lane);
    barrier_arrive(&shared.vectors_full[place.stage]);
    place.advance();
  }
}

template <class Element, int kTileN, Accumulation kAccumulation, class Epilogue>
__device__ __forceinline__ void consume(GemmShared<kTileN, typename Epilogue::Params>& shared, const GemmShape& shape,
                                        int rank) {
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  RingPlace<GemmRing<kTileN>::kStages> place;
  RingPlace<2> vectors;
  // Lane i tells CTA i of the cluster.
  const auto release = [&](int stage) {
    if (lane < shape.cluster) cluster_arrive(cluster_address(&shared.ring.empty[stage], lane));
  };
  TileWalk walk(shape, rank);
  float d[kTileN / 2];
  for (int row0, column0; walk.take(shape, row0, column0);) {
    if constexpr (kAccumulation == Accumulation::kPromoted)
      multiply_tile_promoted<Element, kTileN>(d, shared.ring, place, warpgroup, shape.stages, release);
    else
      multiply_tile<Element, kTileN>(d, shared.ring, place, warpgroup, shape.stages, release);
    barrier_wait(&shared.vectors_full[vectors.stage], vectors.phase);
    const int thread = static_cast<int>(thread_read_anew());  // nothing of the epilogue lives through the mainloop
    const int upper = thread / 32 * 16 + thread % 32 / 4;
    const int end = min(shape.n, column0 + shape.step);
    const EpilogueTile<kTileN> tile = {shared.vectors[vectors.stage], shape.m, end, row0, column0, upper, thread % 32};
    const typename Epilogue::Params params = shared.params;
    Epilogue::template store<kTileN>(params, d, tile);
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.vectors_empty[vectors.stage]);
    vectors.advance();
  }
}

// Whether the warpgroups can take turns, each with a tile of its own: while one finishes its tile the other multiplies.
// Wider tiles have no registers for that; and with promoted sums the tensor cores need both at once to be busy. Where
// no CTA has a second tile they share theirs all the same: two finish it in half the time.
template <int kTileN, Accumulation kAccumulation>
constexpr bool kCanTurn = kTileN == 128 && kAccumulation == Accumulation::kTensorCore;

template <class Element, class Epilogue>
__device__ __forceinline__ void consume_in_turn(GemmShared<128, typename Epilogue::Params>& shared,
                                                const GemmShape& shape, int rank) {
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  RingPlace<GemmRing<128>::kStages> place;
  if (warpgroup == 1) place.skip(shape.stages);
  // The phase of a stage's barrier can be told by its parity only after the use before has been waited for, and that is
  // the other warpgroup's: it says so. The first turn is the first warpgroup's.
  uint32_t turn = warpgroup ^ 1, vectors = 0;
  const auto release = [&](int stage) {
    if (lane < shape.cluster) cluster_arrive(cluster_address(&shared.ring.empty[stage], lane));
  };
  const auto issued = [&] {
    if (lane == 0) barrier_arrive(&shared.turn[warpgroup ^ 1]);
  };
  TileWalk walk(shape, rank, warpgroup, kConsumers);
  float d[2][64];
  for (int row0, column0; walk.take(shape, row0, column0);) {
    barrier_wait(&shared.turn[warpgroup], turn);
    turn ^= 1;
    multiply_whole_tile<Element>(d, shared.ring, place, shape.stages, release, issued);
    place.skip(shape.stages);
    barrier_wait(&shared.vectors_full[warpgroup], vectors);
    vectors ^= 1;
    const typename Epilogue::Params params = shared.params;
    const int thread = static_cast<int>(thread_read_anew());
    const int end = min(shape.n, column0 + shape.step);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int upper = 64 * i + thread % 128 / 32 * 16 + thread % 32 / 4;
      const EpilogueTile<128> tile = {shared.vectors[warpgroup], shape.m, end, row0, column0, upper, thread % 32};
      Epilogue::template store<128>(params, d[i], tile);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.vectors_empty[warpgroup]);
  }
}

template <class Element, int kTileN, Accumulation kAccumulation, class Epilogue>
__global__ __launch_bounds__(kGemmThreads, 1) void gemm(const __grid_constant__ CUtensorMap map_a,
                                                        const __grid_constant__ CUtensorMap map_b,
                                                        const __grid_constant__ GemmShape shape,
                                                        const __grid_constant__ GemmScales scales,
                                                        const __grid_constant__ typename Epilogue::Params params) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<GemmShared<kTileN, typename Epilogue::Params>*>(dynamic_shared);
  const int rank = shape.cluster == 1 ? 0 : static_cast<int>(cluster_rank());
  const bool in_turn =
      kCanTurn<kTileN, kAccumulation> && shape.order.count() * shape.cluster > static_cast<int>(gridDim.x);
  const int releasing = in_turn ? 4 : 4 * kConsumers;  // warps that read a stage
  if (threadIdx.x == 0) {
    shared.params = params;
    prefetch_tensor_map(&map_a);
    prefetch_tensor_map(&map_b);
    for (int i = 0; i < GemmRing<kTileN>::kStages; ++i) {
      barrier_init(&shared.ring.full[i], 1);
      barrier_init(&shared.ring.empty[i], releasing * shape.cluster);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(&shared.vectors_full[i], 32 * kVectorWarps);
      barrier_init(&shared.vectors_empty[i], releasing);
      barrier_init(&shared.turn[i], 4);
    }
    fence_barrier_init();
  }
  __syncthreads();
  // No CTA may write into another, or arrive at its barriers, before those are initialised.
  if (shape.cluster > 1) cluster_sync_relaxed();
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (warp >= 4 * kConsumers) {
    fewer_registers<kProducerRegisters>();
    if (warp == 4 * kConsumers) {
      if (lane == 0) fetch_operands<Element, kTileN>(shared.ring, &map_a, &map_b, shape, rank);
    } else {
      static_assert(kVectorWarps == 3, "all other warps of the producers");
      fetch_vectors(shared, scales, shape, rank, warp - 4 * kConsumers - 1, lane);
    }
    __syncwarp();
  } else {
    more_registers<kConsumerRegisters>();
    if constexpr (kCanTurn<kTileN, kAccumulation>) {
      if (in_turn)
        consume_in_turn<Element, Epilogue>(shared, shape, rank);
      else
        consume<Element, kTileN, kAccumulation, Epilogue>(shared, shape, rank);
    } else {
      consume<Element, kTileN, kAccumulation, Epilogue>(shared, shape, rank);
    }
  }
  // The other CTA may still be about to arrive at this one's barriers.
  if (shape.cluster > 1) cluster_sync_relaxed();
}

}  // namespace fut
