// E4M3 weights times 16-bit activations: channels are the rows of the products, tokens their columns. A warpgroup
// converts its 64 rows of weights in registers; a 16-bit copy of them exists nowhere else. One thread fetches. Two
// warpgroups multiply: both at a tile of 128 channels, or in turns, each at tiles of 64 of its own, so that one ends a
// tile while the other multiplies.

#pragma once

#include <type_traits>

#include "../ptx/dependency.cuh"
#include "../ptx/tensor_copy.cuh"
#include "mainloop.cuh"
#include "w8a16_store.cuh"

namespace fut {

inline constexpr int kW8a16Threads = 128 * 3;
inline constexpr int kW8a16ProducerRegisters = 40, kW8a16ConsumerRegisters = 232;

template <int kTokens, int kChannels>
struct __align__(1024) W8a16Shared {
  static constexpr int kStageBytes = kChannels * kW8a16Stage + kTokens * 2 * kW8a16Stage;
  static constexpr int kMostStages = 16 * kW8a16Cooperative / kChannels;
  static constexpr int kStages = 200 * 1024 / kStageBytes < kMostStages ? 200 * 1024 / kStageBytes : kMostStages;
  uint8_t activations[kStages][kTokens * 2 * kW8a16Stage];
  uint8_t weights[kStages][kChannels * kW8a16Stage];
  uint64_t full[kStages], empty[kStages];
  uint64_t turn[2];  // the other warpgroup has waited for all of its unit's stages
  uint32_t arrived[2];
};

// What a CTA sums next: a tile and a part of K. Splits of a tile follow each other, so that they run at the same time
// and share its activations.
struct W8a16Unit {
  int channel_tile, token_tile, split, first, stages;

  __device__ __forceinline__ W8a16Unit(const W8a16Params& p, int unit) {
    split = unit % p.splits;
    const int tile = unit / p.splits;
    token_tile = tile % p.token_tiles;
    channel_tile = tile / p.token_tiles;
    first = split * p.stages_a_split;
    stages = min(p.stages_a_split, p.stages - first);
  }
};

template <int kTokens, int kChannels>
__device__ __forceinline__ void fetch_w8a16(W8a16Shared<kTokens, kChannels>& shared, const CUtensorMap* weights,
                                            const CUtensorMap* activations, const W8a16Params& p, int units) {
  RingPlace<W8a16Shared<kTokens, kChannels>::kStages> place;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const W8a16Unit u(p, unit);
    for (int s = 0; s < u.stages; ++s) {
      barrier_wait(&shared.empty[place.stage], place.phase ^ 1);
      uint64_t* full = &shared.full[place.stage];
      barrier_expect(full, W8a16Shared<kTokens, kChannels>::kStageBytes);
      const int k = (u.first + s) * kW8a16Stage;
      tensor_copy(shared.weights[place.stage], weights, k, u.channel_tile * kChannels, full);
      tensor_copy(shared.activations[place.stage], activations, k, u.token_tile * kTokens, full);
      place.advance();
    }
  }
}

// Stage after stage, two sets of registers in turn: while the tensor cores read one, the other is converted. `issued()`
// is called once all of the unit's stages have been waited for.
template <class Activation, int kTokens, int kChannels, class Release, class Issued>
__device__ __forceinline__ void multiply_w8a16(float (&d)[kTokens / 2], W8a16Shared<kTokens, kChannels>& shared,
                                               RingPlace<W8a16Shared<kTokens, kChannels>::kStages>& place, int stages,
                                               int row, int lane, Release release, Issued issued) {
  StageFragments fragments[2];
  int previous = 0;
  settle(d);
#pragma unroll 1
  for (int s = 0; s < stages; s += 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (s + i < stages) {
        barrier_wait(&shared.full[place.stage], place.phase);
        load_fragments<Activation>(fragments[i], shared.weights[place.stage], row, lane);
        const uint64_t b = swizzled_rows(shared.activations[place.stage]);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kW8a16Stage / 16; ++step)
          wgmma(Activation{}, d, fragments[i][step], b + 2 * step, s + i + step > 0);
        wgmma_commit();
        if (s + i + 1 == stages) issued();
        wgmma_wait<1>();
        if (s + i > 0) release(previous);
        previous = place.stage;
        place.advance();
      }
    }
  }
  wgmma_wait<0>();
  settle(d);
  release(previous);
}

template <class Activation, int kTokens, int kChannels, class Out>
__device__ __forceinline__ void consume_w8a16(W8a16Shared<kTokens, kChannels>& shared, const W8a16Params& p,
                                              int units) {
  constexpr bool kInTurns = kChannels == kW8a16PingPong;
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16 % kChannels;  // of the tile's channels
  const int64_t parts = static_cast<int64_t>(p.channel_tiles) * p.token_tiles * (kChannels / 64);
  RingPlace<W8a16Shared<kTokens, kChannels>::kStages> place;
  const auto release = [&](int stage) {
    if (lane == 0) barrier_arrive(&shared.empty[stage]);
  };
  // As in the GEMM (consume_in_turn): a stage's phase can be told by its parity only after the use before has been
  // waited for. The first turn is the first warpgroup's.
  const auto issued = [&] {
    if (kInTurns && lane == 0) barrier_arrive(&shared.turn[warpgroup ^ 1]);
  };
  uint32_t phase = warpgroup ^ 1;
  float d[kTokens / 2];
  int turn = 0;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x, turn ^= 1) {
    const W8a16Unit u(p, unit);
    if (kInTurns && turn != warpgroup) {
      place.skip(u.stages);
      continue;
    }
    if (kInTurns) {
      barrier_wait(&shared.turn[warpgroup], phase);
      phase ^= 1;
    }
    multiply_w8a16<Activation, kTokens, kChannels>(d, shared, place, u.stages, warp_row + lane / 4, lane, release,
                                                   issued);
    const int64_t part = static_cast<int64_t>(unit / p.splits) * (kChannels / 64) + (kInTurns ? 0 : warpgroup);
    if (p.splits > 1 && !merge_splits<kTokens>(d, p, part, parts, u.split, warpgroup, &shared.arrived[warpgroup]))
      continue;
    W8a16Place at = {u.channel_tile * kChannels + warp_row, u.token_tile * kTokens, lane, {}, {}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int channel = at.channel0 + lane / 4 + 8 * half;
      const bool inside = channel < p.n;
      at.alpha[half] = kWidened<Activation> * (inside ? p.alpha[p.alpha_is_vector ? channel : 0] : 0.f);
      at.bias[half] = inside && p.bias != nullptr ? p.bias[channel] : 0.f;
    }
    if constexpr (std::is_same_v<Out, OutF32>)
      store_f32_tokens<kTokens>(d, p, at);
    else
      store_16_bit_tokens<kTokens>(Out{}, d, p, at);
  }
}

template <class Activation, int kTokens, int kChannels, class Out>
__global__ __launch_bounds__(kW8a16Threads, 1) void w8a16(const __grid_constant__ CUtensorMap weights,
                                                          const __grid_constant__ CUtensorMap activations,
                                                          const __grid_constant__ W8a16Params p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<W8a16Shared<kTokens, kChannels>*>(dynamic_shared);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&weights);
    prefetch_tensor_map(&activations);
    for (int i = 0; i < 2; ++i) barrier_init(&shared.turn[i], 4);
    for (int i = 0; i < W8a16Shared<kTokens, kChannels>::kStages; ++i) {
      barrier_init(&shared.full[i], 1);
      barrier_init(&shared.empty[i], kChannels / 16);  // warps that read the stage
    }
    fence_barrier_init();
  }
  __syncthreads();
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int units = p.channel_tiles * p.token_tiles * p.splits;
  if (threadIdx.x >= 256) {
    fewer_registers<kW8a16ProducerRegisters>();
    if (threadIdx.x == 256) fetch_w8a16<kTokens, kChannels>(shared, &weights, &activations, p, units);
  } else {
    more_registers<kW8a16ConsumerRegisters>();
    consume_w8a16<Activation, kTokens, kChannels, Out>(shared, p, units);
  }
}

}  // namespace fut
