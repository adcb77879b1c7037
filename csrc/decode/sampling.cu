// The next token of every row, as fut_runtime/sampling.py chooses it; docs/numerics.md, "Sampling on the device".
//
// A cluster of blocks works on a row: its logits are read once, into the shared memory of the cluster, and all passes
// over them stay on chip. Decisions are taken by all blocks alike from values that all of them gather.

#include <cooperative_groups.h>

#include <cmath>

#include "../host/kernel_attributes.h"
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
  ClusterGather::Shared gather;
  SelectShared select;
};

constexpr double kTwo64 = 18446744073709551616.0;

// The share `fraction` in [0, 1] of `total`, rounded down.
__device__ __forceinline__ uint64_t share_of(double fraction, uint64_t total) {
  return __umul64hi(__double2ull_rz(fraction * kTwo64), total);
}

// The same, rounded up, at least 1.
__device__ __forceinline__ uint64_t share_reached(double fraction, uint64_t total) {
  const uint64_t scaled = __double2ull_rz(fraction * kTwo64);
  const uint64_t share = __umul64hi(scaled, total) + (scaled * total != 0);
  return share > 0 ? share : 1;
}

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
  if (!top_k && !top_p) return 0;
  Selector selector(shared, gather, row);
  selector.first_histogram(range, static_cast<float>(-kZeroWeightExponent) * sampling.temperature);
  Selector::Cut kept{0, selector.all_weight()};
  if (top_k && static_cast<uint32_t>(sampling.top_k) < selector.all_tokens()) {
    kept = selector.select(Amount::kTokens, sampling.top_k);
  }
  if (top_p) kept = selector.select(Amount::kWeight, share_reached(sampling.top_p, kept.weight));
  return kept.rank;
}

// Inverts the distribution of the kept tokens, in the order of their ids; one thread of the cluster writes the token.
__device__ __forceinline__ void draw(const fut_sampling& sampling, SelectShared& shared, ClusterGather& gather,
                                     const RowSlice& row, uint64_t cut, int32_t* token) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const double least = fmax(sampling.min_p > 0.0f ? fmin(log(static_cast<double>(sampling.min_p)), 0.0) : -INFINITY,
                            kZeroWeightExponent);
  const auto kept_weight = [&](int i) -> uint64_t {
    if (i >= row.length || rank_of(row.keys[i], row.first_id + i) < cut) return 0;
    const double exponent = row.softmax.exponent(row.keys[i]);
    return exponent < least ? 0 : Softmax::weight(exponent);
  };
  // A run of neighbouring ids a warp.
  const int run = (row.length + kSampleThreads - 1) / kSampleThreads * 32;
  const int first = warp * run;
  uint64_t weight = 0;
  for (int i = first + lane; i < min(first + run, row.length); i += 32) weight += kept_weight(i);
  weight = warp_sum(weight);
  if (lane == 0) shared.warp_weight[warp] = weight;
  __syncthreads();
  const uint64_t of_warp = shared.warp_weight[lane];
  const uint64_t running = warp_scan(of_warp);
  const Pair* blocks = gather.all({__shfl_sync(~0u, running, 31), 0});

  const auto cluster = cg::this_cluster();
  uint64_t total = 0, before = 0;
  for (unsigned block = 0; block < cluster.num_blocks(); ++block) {
    if (block == cluster.block_rank()) before = total;
    total += blocks[block].first;
  }
  // The first token at which the running weight exceeds the target.
  const uint64_t target = share_of(sampling.uniform, total);
  if (target < before || target >= before + blocks[cluster.block_rank()].first) return;
  uint64_t rest = target - before;
  const int chosen = __ffs(__ballot_sync(~0u, running > rest)) - 1;
  if (warp != chosen) return;
  rest -= __shfl_sync(~0u, running - of_warp, chosen);
  for (int start = first; start < first + run; start += 32) {
    const uint64_t reached = warp_scan(kept_weight(start + lane));
    const unsigned past = __ballot_sync(~0u, reached > rest);
    if (past != 0) {
      if (lane == 0) *token = row.first_id + start + __ffs(past) - 1;
      return;
    }
    rest -= __shfl_sync(~0u, reached, 31);
  }
}

__global__ __launch_bounds__(kSampleThreads, 1) void sample_kernel(const float* logits, const fut_sampling* samplings,
                                                                   int32_t* tokens, int vocab, int slice) {
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  SampleShared& shared = *reinterpret_cast<SampleShared*>(dynamic_shared);
  uint32_t* keys = reinterpret_cast<uint32_t*>(dynamic_shared + sizeof(SampleShared));
  const auto cluster = cg::this_cluster();
  // Nobody may write into the shared memory of a block that has not started.
  auto started = cluster.barrier_arrive();
  if (threadIdx.x < 2) shared.select.list_tokens[threadIdx.x] = 0;

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
  const RowSlice view{keys, first_id, length, {best, 1.0 / static_cast<double>(sampling.temperature)}};
  const uint64_t cut =
      filter_cut(sampling, shared.select, gather, view, best - key_value(rank_key(extremes.first)), vocab);
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
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kClusterBlocks, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kClusterBlocks, rows);
  config.blockDim = dim3(kSampleThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = programmatic_launch ? 2 : 1;
  return cudaLaunchKernelEx(&config, sample_kernel, logits, sampling, tokens, vocab, slice);
}

}  // namespace fut
