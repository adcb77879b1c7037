// Where the filters cut a row: the token at which a running count, or a running weight, in the order of decreasing
// logits reaches a target. The row's keys lie in the shared memory of a cluster of blocks.
//
// A histogram over 1024 bins of the order narrows the search to one bin. When no more than 1024 tokens are in it, every
// block gathers them all and finishes alone, so that no result has to be sent: a histogram inside the bin, and a sort
// of the few that are left. When there are more, a finer histogram over the bin follows.

#pragma once

#include <cmath>
#include <cstdint>

#include "cluster_block.cuh"
#include "token_order.cuh"

namespace fut {

inline constexpr int kBinBits = 10;
inline constexpr int kBins = 1 << kBinBits;
static_assert(kBins == kSampleThreads, "a thread looks after one bin");
inline constexpr uint32_t kListCapacity = kSampleThreads;

// What a search adds up on its way down the order.
enum class Amount { kTokens, kWeight };

struct SelectShared {
  uint32_t low[kBins], high[kBins];  // this block's histogram: shared memory adds 32 bits natively, 64 in a loop
  uint64_t merged[kBins];            // the cluster's, in this block's share of the bins
  uint64_t list[2][kListCapacity];   // members of the bin; a list a search, since others may still read the last one
  uint32_t list_tokens, few_tokens;
  uint64_t few[kListCapacity];
  uint64_t warp_total[kSampleWarps];
  struct Found {
    uint64_t before, rank, total;
    int bin;
  } found;
};

// The row as a block sees it.
struct RowSlice {
  const uint32_t* keys;  // shared memory [length]
  int first_id, length;
  Softmax softmax;
};

// Assigns ranks to bins, 0 the most probable. Ranks outside have none.
struct BinMap {
  uint64_t low, high;       // ranks that have a bin
  int shift;                // of the distance from `high`; below zero: linear in the logit
  float top, scale, reach;  // linear bins end at `reach` below the top

  // Never decreases along the order: each step of the arithmetic is monotone, roundings included.
  __device__ __forceinline__ int bin(uint64_t rank) const {
    if (rank < low || rank > high) return -1;
    if (shift >= 0) return static_cast<int>((high - rank) >> shift);
    const float distance = top - key_value(rank_key(rank));
    return distance <= reach ? last_at_most(distance * scale) : -1;
  }

  // The place inside a bin of a rank that lies there, as one of kBins finer bins.
  __device__ __forceinline__ int finer_bin(uint64_t rank, int bin) const {
    if (shift >= 0) {
      const uint64_t inside = high - rank - (static_cast<uint64_t>(bin) << shift);
      return static_cast<int>(inside >> max(0, shift - kBinBits));
    }
    const float place = (top - key_value(rank_key(rank))) * scale;
    return last_at_most((place - static_cast<float>(bin)) * kBins);  // both steps are exact
  }

 private:
  static __device__ __forceinline__ int last_at_most(float place) { return min(__float2int_rz(place), kBins - 1); }
};

class Selector {
 public:
  // `range`: largest logit less the smallest one; `reach`: tokens farther below the top weigh nothing.
  __device__ __forceinline__ Selector(SelectShared& shared, ClusterGather& gather, const RowSlice& row, float range,
                                      float reach)
      : shared_(shared), gather_(gather), row_(row), reach_(reach) {
    const float span = fminf(range, reach);
    scale_ = span > 0.0f ? fminf(kBins / span, 3.4e38f) : 0.0f;
  }

  // Lowest rank that has one of the `k` largest logits, or equals the last of them.
  __device__ uint64_t top_k(uint32_t k) {
    const BinMap all = linear_map(0);
    uint64_t before = 0;
    const uint64_t bin = histogram(Amount::kTokens, all, before);
    return k < shared_.found.total ? narrow(Amount::kTokens, k, all, bin, before) : 0;
  }

  // Rank of the last token of the shortest prefix that weighs at least the share `p` of all from rank `floor` on.
  __device__ uint64_t top_p(double p, uint64_t floor) {
    if (kept_ <= kListCapacity) {
      // All of them are in the first bin.
      const BinMap kept{floor, ~0ull, -1, row_.softmax.top(), scale_ * (0.99f / kBins), INFINITY};
      collect(kept, 0, Amount::kWeight);
      return search_list(Amount::kWeight, 0, p, kept, 0, 0);
    }
    const BinMap all = linear_map(floor);
    uint64_t before = 0;
    const uint64_t bin = histogram(Amount::kWeight, all, before);
    return narrow(Amount::kWeight, share_reached(p, shared_.found.total), all, bin, before);
  }

 private:
  // The share p in [0, 1] of `total`, rounded up, at least 1.
  static __device__ __forceinline__ uint64_t share_reached(double p, uint64_t total) {
    const uint64_t scaled = __double2ull_rz(p * 18446744073709551616.0);
    const uint64_t share = __umul64hi(scaled, total) + (scaled * total != 0);
    return share > 0 ? share : 1;
  }

  __device__ __forceinline__ BinMap linear_map(uint64_t floor) const {
    return {floor, ~0ull, -1, row_.softmax.top(), scale_, reach_};
  }

  // Equal logits are one place in the order when tokens are counted: the cut keeps all of them.
  __device__ __forceinline__ uint64_t rank(int index, Amount amount) const {
    const uint64_t key = row_.keys[index];
    return amount == Amount::kWeight ? rank_of(key, row_.first_id + index) : key << 32;
  }

  // Returns the amount in this thread's bin; `before` comes as the amount before the first bin and leaves as that
  // before this thread's. The amount of all bins goes to found.total.
  __device__ uint64_t histogram(Amount amount, const BinMap& map, uint64_t& before) {
    const auto cluster = cooperative_groups::this_cluster();
    const int thread = threadIdx.x;
    clear_bins();
    for (int i = thread; i < row_.length; i += kSampleThreads) {
      const uint64_t token = rank(i, amount);
      const int bin = map.bin(token);
      if (bin >= 0) add_to_bin(bin, token, amount);
    }
    cluster.sync();
    // Each block adds up a share of the bins over all blocks, then all read the sums.
    const int blocks = cluster.num_blocks();
    const int share = kBins / blocks;
    if (thread < share) {
      const int bin = cluster.block_rank() * share + thread;
      uint64_t sum = 0;
#pragma unroll 8
      for (int block = 0; block < blocks; ++block) {
        const SelectShared* other = cluster.map_shared_rank(&shared_, block);
        sum += (static_cast<uint64_t>(other->high[bin]) << 32) + other->low[bin];
      }
      shared_.merged[bin] = sum;
    }
    cluster.sync();
    const uint64_t inside = cluster.map_shared_rank(&shared_, thread / share)->merged[thread];
    before += total_before(inside);
    return inside;
  }

  __device__ __forceinline__ void clear_bins() {
    shared_.low[threadIdx.x] = shared_.high[threadIdx.x] = 0;
    __syncthreads();
  }

  __device__ __forceinline__ uint64_t amount_of(uint64_t token, Amount amount) const {
    return amount == Amount::kTokens ? 1 : row_.softmax.weight(row_.softmax.distance(rank_key(token)));
  }

  __device__ __forceinline__ void add_to_bin(int bin, uint64_t token, Amount amount) {
    if (amount == Amount::kTokens) {
      atomicAdd(&shared_.low[bin], 1u);
      return;
    }
    const uint64_t weight = amount_of(token, amount);
    const uint32_t low = static_cast<uint32_t>(weight);
    const uint32_t old = atomicAdd(&shared_.low[bin], low);
    const uint32_t high = static_cast<uint32_t>(weight >> 32) + (old + low < old);
    if (high != 0) atomicAdd(&shared_.high[bin], high);
  }

  // The amounts of the threads before this one; that of all goes to found.total.
  __device__ __forceinline__ uint64_t total_before(uint64_t amount) {
    const uint64_t running = block_scan(amount, shared_.warp_total);
    if (threadIdx.x == kSampleThreads - 1) shared_.found.total = running;
    __syncthreads();
    return running - amount;
  }

  // The thread whose amount `inside`, with what comes `before` it, reaches the target names its bin and its `before`.
  __device__ __forceinline__ int find_bin(uint64_t target, uint64_t inside, uint64_t& before) {
    if (before < target && target <= before + inside) {
      shared_.found.before = before;
      shared_.found.bin = threadIdx.x;
    }
    __syncthreads();
    before = shared_.found.before;
    return shared_.found.bin;
  }

  // The rank at which the running amount reaches `target`, from this thread's bin of a histogram that holds it.
  __device__ uint64_t narrow(Amount amount, uint64_t target, BinMap map, uint64_t inside, uint64_t before) {
    while (true) {
      const int bin = find_bin(target, inside, before);
      if (collect(map, bin, amount) <= kListCapacity) return search_list(amount, target, 0.0, map, bin, before);
      const Pair limits = members(map, bin, amount);
      if (limits.first == limits.second) return limits.first;
      map.low = limits.first;
      map.high = limits.second;
      map.shift = max(0, 64 - __clzll(map.high - map.low) - 10);
      inside = histogram(amount, map, before);
    }
  }

  // Lists this block's members of a bin, as far as they fit, and gathers how many each block has. Returns their sum.
  __device__ uint32_t collect(const BinMap& map, int bin, Amount amount) {
    uint64_t* list = shared_.list[static_cast<int>(amount)];
    if (threadIdx.x == 0) shared_.list_tokens = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < row_.length; i += kSampleThreads) {
      const uint64_t token = rank(i, amount);
      if (map.bin(token) != bin) continue;
      const uint32_t place = atomicAdd(&shared_.list_tokens, 1u);
      if (place < kListCapacity) list[place] = token;
    }
    __syncthreads();
    lists_ = gather_.all({shared_.list_tokens, 0});
    uint64_t tokens = 0;
    for (unsigned block = 0; block < cooperative_groups::this_cluster().num_blocks(); ++block) {
      tokens += lists_[block].first;
    }
    return static_cast<uint32_t>(tokens);
  }

  // Smallest and largest rank in a bin.
  __device__ Pair members(const BinMap& map, int bin, Amount amount) {
    Pair seen{~0ull, 0};
    for (int i = threadIdx.x; i < row_.length; i += kSampleThreads) {
      const uint64_t token = rank(i, amount);
      if (map.bin(token) != bin) continue;
      seen = {min(seen.first, token), max(seen.second, token)};
    }
    return gather_.extremes(seen);
  }

  // The rank among the members collected at which the amount, `before` all of them at first, reaches `target`; or,
  // where that is 0, the share p of their own.
  __device__ uint64_t search_list(Amount amount, uint64_t target, double p, const BinMap& map, int bin,
                                  uint64_t before) {
    const auto cluster = cooperative_groups::this_cluster();
    const uint32_t thread = threadIdx.x;
    uint64_t token = 0;
    uint32_t tokens = 0;
    for (unsigned block = 0; block < cluster.num_blocks(); ++block) {
      const uint32_t here = static_cast<uint32_t>(lists_[block].first);
      if (thread - tokens < here) {
        token = cluster.map_shared_rank(&shared_, block)->list[static_cast<int>(amount)][thread - tokens];
      }
      tokens += here;
    }
    const bool member = thread < tokens;
    clear_bins();
    const int finer = member ? map.finer_bin(token, bin) : -1;
    if (member) add_to_bin(finer, token, amount);
    if (thread == 0) shared_.few_tokens = 0;
    __syncthreads();
    const uint64_t inside = (static_cast<uint64_t>(shared_.high[thread]) << 32) + shared_.low[thread];
    uint64_t reached = before + total_before(inside);
    if (target == 0) target = share_reached(p, shared_.found.total);
    const int few_bin = find_bin(target, inside, reached);
    if (finer == few_bin) shared_.few[atomicAdd(&shared_.few_tokens, 1u)] = token;
    __syncthreads();
    return search_few(amount, target, reached);
  }

  // The same among the few tokens listed last.
  __device__ __forceinline__ uint64_t search_few(Amount amount, uint64_t target, uint64_t before) {
    const uint32_t thread = threadIdx.x, tokens = shared_.few_tokens;
    const bool member = thread < tokens;
    uint64_t token = member ? shared_.few[thread] : 0;  // below all members
    token = block_sort_descending(token, tokens <= 1 ? 1 : 1 << (32 - __clz(tokens - 1)), shared_.few);
    const uint64_t step = member ? amount_of(token, amount) : 0;
    const uint64_t running = before + total_before(step) + step;
    if (running - step < target && target <= running) shared_.found.rank = token;
    __syncthreads();
    const uint64_t cut = shared_.found.rank;
    if (amount == Amount::kTokens) kept_ = before + __syncthreads_count(member && token >= cut);
    return cut;
  }

  SelectShared& shared_;
  ClusterGather& gather_;
  const RowSlice& row_;
  float reach_, scale_;
  const Pair* lists_ = nullptr;
  uint64_t kept_ = ~0ull;  // tokens that top-k left, where a list told
};

}  // namespace fut
