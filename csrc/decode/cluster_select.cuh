// Where the filters cut a row: the token at which a running count, or a running weight, in the order of decreasing
// logits reaches a target. The row's keys lie in the shared memory of a cluster of blocks.
//
// A histogram over 1024 bins of the order narrows the search to one bin. When no more than 1024 tokens are in it, every
// block gathers and sorts them all, so that no result has to be sent; else a finer histogram over that bin follows.

#pragma once

#include <cstdint>

#include "cluster_block.cuh"
#include "token_order.cuh"

namespace fut {

inline constexpr int kBins = kSampleThreads;  // one a thread
inline constexpr int kListCapacity = kSampleThreads;

// What a search adds up on its way down the order.
enum class Amount { kTokens, kWeight };

struct SelectShared {
  uint32_t tokens[kBins];  // this block's histogram; weights in two words, since shared memory adds 32 bits natively
  uint32_t weight_low[kBins], weight_high[kBins];
  uint64_t merged_weight[kBins];  // the cluster's, for this block's share of the bins
  uint32_t merged_tokens[kBins];
  uint64_t list[2][kListCapacity];  // members of the bin; a list a search, since others may still read the last one
  uint32_t list_tokens[2];
  uint64_t exchange[kSampleThreads];
  uint64_t warp_weight[kSampleWarps];
  uint64_t all_weight;
  uint32_t warp_tokens[kSampleWarps];
  uint32_t all_tokens;
  struct Found {
    uint64_t rank, weight_before, weight;
    uint32_t tokens_before, tokens, bin;
  } found;
};

// The row as a block sees it.
struct RowSlice {
  const uint32_t* keys;  // shared memory [length]
  int first_id, length;
  Softmax softmax;
};

// Assigns tokens to bins, 0 the most probable. Tokens outside, or of no weight, have none.
struct BinMap {
  uint64_t low, high;  // ranks that have a bin
  int shift;           // of the distance from `high`; below zero: linear in the logit
  float top, scale;

  // Never decreases along the order: each step of the arithmetic is monotone, roundings included.
  __device__ __forceinline__ int bin(uint64_t rank) const {
    if (shift < 0) {
      const int linear = __float2int_rz((top - key_value(rank_key(rank))) * scale);
      return linear < kBins - 1 ? linear : kBins - 1;
    }
    return rank < low || rank > high ? -1 : static_cast<int>((high - rank) >> shift);
  }
};

// One bin of the cluster's histogram, and the sums over the bins before it.
struct BinTotals {
  uint32_t tokens, tokens_before;
  uint64_t weight, weight_before;
};

class Selector {
 public:
  __device__ __forceinline__ Selector(SelectShared& shared, ClusterGather& gather, const RowSlice& row)
      : shared_(shared), gather_(gather), row_(row) {}

  // `range`: largest logit less the smallest one.
  __device__ __forceinline__ void first_histogram(float range, float reach) {
    // Logits farther than `reach` below the top weigh nothing, so the bins span no more than that.
    const float span = fminf(range, reach);
    first_.shift = -1;
    first_.top = static_cast<float>(row_.softmax.top);
    first_.scale = span > 0.0f ? fminf(kBins / span, 3.4e38f) : 0.0f;
    first_totals_ = histogram(first_, true, 0, 0);
    if (threadIdx.x == kBins - 1) {
      shared_.all_tokens = first_totals_.tokens_before + first_totals_.tokens;
      shared_.all_weight = first_totals_.weight_before + first_totals_.weight;
    }
    __syncthreads();
  }

  // Tokens that weigh more than nothing, and their weight.
  __device__ __forceinline__ uint32_t all_tokens() const { return shared_.all_tokens; }
  __device__ __forceinline__ uint64_t all_weight() const { return shared_.all_weight; }

  struct Cut {
    uint64_t rank;    // tokens of at least this rank make up the target
    uint64_t weight;  // their weight
  };

  // The token in which the running amount reaches `target`, from 1 to the total amount. Tokens count equal logits as
  // one place: the cut then keeps all of them. Every thread of every block gets the same.
  __device__ Cut select(Amount amount, uint64_t target) {
    const bool with_id = amount == Amount::kWeight;
    BinMap map = first_;
    find_bin(amount, target, first_totals_);
    while (shared_.found.tokens > kListCapacity) {
      const SelectShared::Found found = shared_.found;
      const Pair limits = members(map, found.bin, with_id);
      if (limits.first == limits.second) return {limits.first, found.weight_before + found.weight};
      map.low = limits.first;
      map.high = limits.second;
      map.shift = max(0, 64 - __clzll(map.high - map.low) - 10);
      find_bin(amount, target, histogram(map, with_id, found.tokens_before, found.weight_before));
    }
    return select_in_list(amount, target, map, with_id);
  }

 private:
  __device__ __forceinline__ uint64_t rank(int index, bool with_id) const {
    const uint64_t full = rank_of(row_.keys[index], row_.first_id + index);
    return with_id ? full : full >> 32 << 32;
  }

  __device__ BinTotals histogram(const BinMap& map, bool with_id, uint32_t tokens_before, uint64_t weight_before) {
    const auto cluster = cooperative_groups::this_cluster();
    const int thread = threadIdx.x;
    shared_.tokens[thread] = shared_.weight_low[thread] = shared_.weight_high[thread] = 0;
    __syncthreads();
    for (int i = thread; i < row_.length; i += kSampleThreads) {
      const uint64_t token = rank(i, with_id);
      const int bin = map.bin(token);
      if (bin < 0) continue;
      const double exponent = row_.softmax.exponent(rank_key(token));
      if (exponent < kZeroWeightExponent) continue;
      const uint64_t weight = Softmax::weight(exponent);
      if (weight == 0) continue;
      const uint32_t low = static_cast<uint32_t>(weight);
      const uint32_t old = atomicAdd(&shared_.weight_low[bin], low);
      const uint32_t high = static_cast<uint32_t>(weight >> 32) + (old + low < old);
      if (high != 0) atomicAdd(&shared_.weight_high[bin], high);
      atomicAdd(&shared_.tokens[bin], 1u);
    }
    cluster.sync();
    // Each block adds up a share of the bins over all blocks, then all read the sums.
    const int blocks = cluster.num_blocks();
    const int share = kBins / blocks;
    if (thread < share) {
      const int bin = cluster.block_rank() * share + thread;
      uint32_t tokens = 0;
      uint64_t weight = 0;
#pragma unroll 8
      for (int block = 0; block < blocks; ++block) {
        const SelectShared* other = cluster.map_shared_rank(&shared_, block);
        tokens += other->tokens[bin];
        weight += static_cast<uint64_t>(other->weight_high[bin]) << 32;
        weight += other->weight_low[bin];
      }
      shared_.merged_tokens[bin] = tokens;
      shared_.merged_weight[bin] = weight;
    }
    cluster.sync();
    const SelectShared* owner = cluster.map_shared_rank(&shared_, thread / share);
    const uint32_t tokens = owner->merged_tokens[thread];
    const uint64_t weight = owner->merged_weight[thread];
    return {tokens, tokens_before + block_scan(tokens, shared_.warp_tokens) - tokens, weight,
            weight_before + block_scan(weight, shared_.warp_weight) - weight};
  }

  __device__ __forceinline__ void find_bin(Amount amount, uint64_t target, const BinTotals& bin) {
    const uint64_t before = amount == Amount::kTokens ? bin.tokens_before : bin.weight_before;
    const uint64_t inside = amount == Amount::kTokens ? bin.tokens : bin.weight;
    __syncthreads();
    if (before < target && target <= before + inside) {
      shared_.found = {0, bin.weight_before, bin.weight, bin.tokens_before, bin.tokens, threadIdx.x};
    }
    __syncthreads();
  }

  __device__ __forceinline__ bool is_member(uint64_t rank, const BinMap& map, int bin) const {
    return map.bin(rank) == bin && Softmax::weight(row_.softmax.exponent(rank_key(rank))) != 0;
  }

  // Smallest and largest rank in a bin.
  __device__ Pair members(const BinMap& map, int bin, bool with_id) {
    uint64_t low = ~0ull, high = 0;
    for (int i = threadIdx.x; i < row_.length; i += kSampleThreads) {
      const uint64_t token = rank(i, with_id);
      if (!is_member(token, map, bin)) continue;
      low = min(low, token);
      high = max(high, token);
    }
    return gather_.extremes({low, high});
  }

  __device__ Cut select_in_list(Amount amount, uint64_t target, const BinMap& map, bool with_id) {
    const auto cluster = cooperative_groups::this_cluster();
    const int thread = threadIdx.x, which = static_cast<int>(amount);
    const SelectShared::Found found = shared_.found;
    for (int i = thread; i < row_.length; i += kSampleThreads) {
      const uint64_t token = rank(i, with_id);
      if (!is_member(token, map, found.bin)) continue;
      shared_.list[which][atomicAdd(&shared_.list_tokens[which], 1u)] = token;
    }
    __syncthreads();
    const Pair* lists = gather_.all({shared_.list_tokens[which], 0});
    uint64_t token = 0;  // below all members
    uint32_t before = 0;
    for (int block = 0; block < static_cast<int>(cluster.num_blocks()); ++block) {
      const uint32_t tokens = static_cast<uint32_t>(lists[block].first);
      if (thread >= static_cast<int>(before) && thread < static_cast<int>(before + tokens)) {
        token = cluster.map_shared_rank(&shared_, block)->list[which][thread - before];
      }
      before += tokens;
    }
    const bool real = thread < static_cast<int>(before);
    const int padded = before <= 1 ? 1 : 1 << (32 - __clz(before - 1));
    token = block_sort_descending(token, padded, shared_.exchange);
    uint64_t weight = real ? Softmax::weight(row_.softmax.exponent(rank_key(token))) : 0;
    uint64_t running = found.weight_before + block_scan(weight, shared_.warp_weight);
    const uint64_t reached = amount == Amount::kTokens ? found.tokens_before + thread + 1 : running;
    const uint64_t step = amount == Amount::kTokens ? 1 : weight;
    if (real && reached - step < target && target <= reached) {
      shared_.found.rank = token;
      shared_.found.weight = running;
    }
    __syncthreads();
    const uint64_t cut = shared_.found.rank;
    if (amount == Amount::kWeight) return {cut, shared_.found.weight};
    // Equals of the last token are kept: the weight is that of all tokens of at least its rank.
    weight = real && token >= cut ? weight : 0;
    running = block_scan(weight, shared_.warp_weight);
    if (thread == kSampleThreads - 1) shared_.found.weight = found.weight_before + running;
    __syncthreads();
    return {cut, shared_.found.weight};
  }

  SelectShared& shared_;
  ClusterGather& gather_;
  const RowSlice& row_;
  BinMap first_{};
  BinTotals first_totals_{};
};

}  // namespace fut
