// What the threads of one block, and the blocks of one cluster, do together: gather, scan, sort.

#pragma once

#include <cooperative_groups.h>

#include <cstdint>

namespace fut {

inline constexpr int kSampleThreads = 1024;
inline constexpr int kSampleWarps = kSampleThreads / 32;
inline constexpr int kMaxClusterBlocks = 16;

struct Pair {
  uint64_t first, second;
};

// Every block of the cluster gives one value and gets those of all. Two sets of slots take turns: a block that runs
// ahead fills the next set, and cannot reach the one after before all have left this one.
class ClusterGather {
 public:
  struct Shared {
    Pair slot[2][kMaxClusterBlocks];
    Pair warp[kSampleWarps];
  };

  __device__ __forceinline__ explicit ClusterGather(Shared& shared) : shared_(shared) {}

  // `value` counts in the first warp. Afterwards all threads may read the returned slots, one a block, by rank.
  __device__ __forceinline__ const Pair* all(Pair value) {
    const auto cluster = cooperative_groups::this_cluster();
    if (threadIdx.x < cluster.num_blocks()) {
      cluster.map_shared_rank(&shared_, threadIdx.x)->slot[turn_][cluster.block_rank()] = value;
    }
    cluster.sync();
    const Pair* slots = shared_.slot[turn_];
    turn_ ^= 1;
    return slots;
  }

  // The smallest `first` and the largest `second` of all threads.
  __device__ __forceinline__ Pair extremes(Pair value) {
    const int lane = threadIdx.x % 32;
    value = warp_extremes(value);
    if (lane == 0) shared_.warp[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x < 32) value = warp_extremes(shared_.warp[lane]);
    const Pair* slots = all(value);
    value = slots[0];
    for (unsigned block = 1; block < cooperative_groups::this_cluster().num_blocks(); ++block) {
      value = {min(value.first, slots[block].first), max(value.second, slots[block].second)};
    }
    return value;
  }

 private:
  static __device__ __forceinline__ Pair warp_extremes(Pair value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      const uint64_t first = __shfl_xor_sync(~0u, value.first, distance);
      const uint64_t second = __shfl_xor_sync(~0u, value.second, distance);
      value = {min(value.first, first), max(value.second, second)};
    }
    return value;
  }

  Shared& shared_;
  int turn_ = 0;
};

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}

// Sum over the lanes up to and including this one.
template <typename T>
__device__ __forceinline__ T warp_scan(T value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T below = __shfl_up_sync(~0u, value, distance);
    if (lane >= distance) value += below;
  }
  return value;
}

// Sum over the threads up to and including this one. `warp_total` is scratch of one element a warp.
template <typename T>
__device__ __forceinline__ T block_scan(T value, T* warp_total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T inside = warp_scan(value);
  if (lane == 31) warp_total[warp] = inside;
  __syncthreads();
  const T before = warp_sum(lane < warp ? warp_total[lane] : T(0));
  __syncthreads();
  return before + inside;
}

// Sorts the first `count` (a power of two) threads' values, largest first: Batcher's bitonic network, by shuffles
// inside a warp and through `exchange` across warps.
__device__ __forceinline__ uint64_t block_sort_descending(uint64_t value, int count, uint64_t* exchange) {
  const int thread = threadIdx.x;
  const bool idle = thread / 32 * 32 >= count;  // whole warps
  for (int run = 2; run <= count; run *= 2) {
    for (int distance = run / 2; distance > 0; distance /= 2) {
      uint64_t other = 0;
      if (distance >= 32) {
        __syncthreads();
        exchange[thread] = value;
        __syncthreads();
        other = exchange[thread ^ distance];
      } else if (idle) {
        continue;
      } else {
        other = __shfl_xor_sync(~0u, value, distance);
      }
      const bool descending = (thread & run) == 0;
      const bool lower = (thread & distance) == 0;
      value = (lower == descending) == (value > other) ? value : other;
    }
  }
  return value;
}

}  // namespace fut
