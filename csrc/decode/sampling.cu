// The next token of every row, as fut_runtime/sampling.py chooses it; docs/numerics.md, "Sampling on the device".
//
// A cluster of blocks works on a row: its logits are read once, into the shared memory of the cluster, and all passes
// over them stay on chip. Decisions are taken by all blocks alike from values that all of them gather.

#include <cooperative_groups.h>

#include <cmath>
#include <utility>

#include "../host/kernel_launch.h"
#include "../ptx/dependency.cuh"
#include "cluster_select.cuh"
#include "sampling.cuh"

namespace fut {
namespace {

namespace cg = cooperative_groups;

// Portable, so that it fits every partition of the card. The token does not depend on it.
constexpr int kClusterBlocks = 8;
constexpr int kLoadsInFlight = 8;

struct SampleShared {
  double powers[Softmax::kTableSize];
  ClusterGather::Shared gather;
  SelectShared select;
};

static_assert(kMaxSampledVocab <= kClusterBlocks * kSampleThreads * 32, "a warp's run must have at most 32 steps");

// Reads this block's slice into keys. Returns the smallest and the largest rank this thread saw.
__device__ __forceinline__ Pair load_keys(const float* logits, uint32_t* keys, int first_id, int length) {
  Pair seen{~0ull, 0};
  for (int start = threadIdx.x; start < length; start += kLoadsInFlight * kSampleThreads) {
    float value[kLoadsInFlight];
#pragma unroll
    for (int load = 0; load < kLoadsInFlight; ++load) {
      const int i = start + load * kSampleThreads;
      value[load] = i < length ? logits[first_id + i] : 0.0f;
    }
#pragma unroll
    for (int load = 0; load < kLoadsInFlight; ++load) {
      const int i = start + load * kSampleThreads;
      if (i >= length) break;
      const uint32_t key = order_key(value[load]);
      keys[i] = key;
      const uint64_t rank = rank_of(key, first_id + i);
      seen = {min(seen.first, rank), max(seen.second, rank)};
    }
  }
  return seen;
}

// Lowest rank that top-k and top-p keep.
__device__ __forceinline__ uint64_t filter_cut(const fut_sampling& sampling, SelectShared& shared,
                                               ClusterGather& gather, const RowSlice& row, float range, int vocab) {
  const bool top_k = sampling.top_k > 0 && sampling.top_k < vocab;
  const bool top_p = sampling.top_p < 1.0f;
  uint64_t cut = 0;
  if (!top_k && !top_p) return cut;
  Selector selector(shared, gather, row, range, Softmax::reach(sampling.temperature));
  if (top_k) cut = selector.top_k(sampling.top_k);
  if (top_p) cut = selector.top_p(sampling.top_p, cut);
  return cut;
}

// Inverts the distribution of the kept tokens, in the order of their ids; one thread of the cluster writes the token.
__device__ __forceinline__ void draw(const fut_sampling& sampling, SelectShared& shared, ClusterGather& gather,
                                     const RowSlice& row, uint64_t cut, int32_t* token) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const double least =
      sampling.min_p > 0.0f ? fmin(log(static_cast<double>(sampling.min_p)), 0.0) * sampling.temperature : -INFINITY;
  const auto kept_weight = [&](int i) -> uint64_t {
    if (i >= row.length || rank_of(row.keys[i], row.first_id + i) < cut) return 0;
    const double distance = row.softmax.distance(row.keys[i]);
    return distance < least ? 0 : row.softmax.weight(distance);
  };
  // A run of neighbouring ids a warp, in steps of 32.
  const int steps = (row.length + kSampleThreads - 1) / kSampleThreads;
  uint64_t weight = 0;
#pragma unroll 4
  for (int step = 0; step < steps; ++step) weight += kept_weight((warp * steps + step) * 32 + lane);
  weight = warp_sum(weight);
  if (lane == 0) shared.warp_total[warp] = weight;
  __syncthreads();
  uint64_t inside = shared.warp_total[lane];
  uint64_t running = warp_scan(inside);
  const Pair* blocks = gather.all({__shfl_sync(~0u, running, 31), 0});

  // The first token at which the running weight exceeds `target`: its block, its warp's run, its step, its lane.
  const auto cluster = cg::this_cluster();
  uint64_t total = 0, before = 0;
  for (unsigned block = 0; block < cluster.num_blocks(); ++block) {
    if (block == cluster.block_rank()) before = total;
    total += blocks[block].first;
  }
  uint64_t target = __umul64hi(__double2ull_rz(sampling.uniform * 18446744073709551616.0), total);
  if (target < before || target >= before + blocks[cluster.block_rank()].first) return;
  target -= before;
  const int run = __ffs(__ballot_sync(~0u, running > target)) - 1;
  target -= __shfl_sync(~0u, running - inside, run);

  const int i = (run * steps + warp) * 32 + lane;  // a warp a step
  const uint64_t reached = warp_scan(warp < steps ? kept_weight(i) : 0);
  if (lane == 31) shared.warp_total[warp] = reached;
  __syncthreads();
  inside = shared.warp_total[lane];
  running = warp_scan(inside);
  const int step = __ffs(__ballot_sync(~0u, running > target)) - 1;
  target -= __shfl_sync(~0u, running - inside, step);
  const unsigned past = __ballot_sync(~0u, reached > target);
  if (warp == step && lane == __ffs(past) - 1) *token = row.first_id + i;
}

__global__ __launch_bounds__(kSampleThreads, 1) void sample_kernel(const float* logits, const fut_sampling* samplings,
                                                                   int32_t* tokens, int vocab, int slice) {
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  SampleShared& shared = *reinterpret_cast<SampleShared*>(dynamic_shared);
  uint32_t* keys = reinterpret_cast<uint32_t*>(dynamic_shared + sizeof(SampleShared));
  const auto cluster = cg::this_cluster();
  // Nobody may write into the shared memory of a block that has not started.
  auto started = cluster.barrier_arrive();
  if (threadIdx.x < Softmax::kTableSize) Softmax::fill(shared.powers, threadIdx.x);

  const int row = blockIdx.y;
  const int first_id = cluster.block_rank() * slice;
  const int length = max(0, min(slice, vocab - first_id));
  wait_for_previous_kernel();
  const fut_sampling sampling = samplings[row];
  const Pair seen = load_keys(logits + static_cast<int64_t>(row) * vocab, keys, first_id, length);
  let_next_kernel_start();

  cluster.barrier_wait(std::move(started));
  ClusterGather gather(shared.gather);
  const Pair extremes = gather.extremes(seen);
  const uint32_t top = rank_key(extremes.second);
  const bool usable = top < kKeyPositiveInfinity && top > kKeyNegativeInfinity;
  if (!usable || !(sampling.temperature > 0.0f)) {
    if (cluster.block_rank() == 0 && threadIdx.x == 0) {
      tokens[row] = usable ? static_cast<int32_t>(rank_id(extremes.second)) : -1;
    }
    return;
  }
  const float best = key_value(top);
  const RowSlice view{keys, first_id, length, Softmax(best, sampling.temperature, shared.powers)};
  const float range = best - key_value(rank_key(extremes.first));
  const uint64_t cut = filter_cut(sampling, shared.select, gather, view, range, vocab);
  draw(sampling, shared.select, gather, view, cut, tokens + row);
}

}  // namespace

cudaError_t launch_sampling(const float* logits, const fut_sampling* sampling, int32_t* tokens, int rows, int vocab,
                            void* /*workspace*/, cudaStream_t stream, bool programmatic_launch) {
  const int slice = (vocab + kClusterBlocks - 1) / kClusterBlocks;
  const size_t shared_bytes = sizeof(SampleShared) + sizeof(uint32_t) * slice;
  const cudaError_t set =
      cudaFuncSetAttribute(sample_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (set != cudaSuccess) return set;
  const cudaError_t shared = share_multiprocessor(sample_kernel);
  if (shared != cudaSuccess) return shared;
  const LaunchShape shape = {dim3(kClusterBlocks, rows), kSampleThreads, static_cast<int>(shared_bytes), kClusterBlocks,
                             programmatic_launch};
  return launch_kernel(sample_kernel, shape, stream, logits, sampling, tokens, vocab, slice);
}

}  // namespace fut
