// The product of a warpgroup's 64 rows with a tile of B, stage by stage of the ring that the producer fills.

#pragma once

#include "../ptx/wgmma.cuh"
#include "gemm_params.h"

namespace fut {

// Stages of K between two promotions. The tensor cores add E4M3 products with about 14 bits; sums of so many are added
// up in FP32 instead. Two stages, so that the other two of a 256-column tile's ring can be refilled meanwhile: one half
// of the columns passes over both before the other does.
inline constexpr int kPromotedStages = 2;

// How partial sums are kept.
enum class Accumulation { kTensorCore, kPromoted };

template <int kTileN>
struct GemmRing {
  static constexpr int kStages = kTileN == 256 ? 4 : 6;
  uint8_t a[kStages][kGemmTileM * kGemmStageBytes];
  uint8_t b[kStages][kTileN * kGemmStageBytes];
  uint64_t full[kStages], empty[kStages];
};

// A stage of the ring and the phase of its barriers.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void skip(int count) {
    const int laps = (stage + count) / kStages;
    stage += count - laps * kStages;
    phase ^= laps & 1;
  }
};

// One stage: four instructions of 32 bytes of K each.
template <class Element, int kCount>
__device__ __forceinline__ void multiply_stage(float (&d)[kCount], uint64_t a, uint64_t b, bool accumulate) {
#pragma unroll
  for (int i = 0; i < kGemmStageBytes / 32; ++i) wgmma(Element{}, d, a + 2 * i, b + 2 * i, accumulate || i > 0);
}

// `release(stage)` tells the producers that this warp no longer reads a stage.
template <class Element, int kTileN, class Release>
__device__ __forceinline__ void multiply_tile(float (&d)[kTileN / 2], GemmRing<kTileN>& ring,
                                              RingPlace<GemmRing<kTileN>::kStages>& place, int warpgroup, int stages,
                                              Release release) {
  int previous = 0;
  settle(d);
#pragma unroll 1
  for (int s = 0; s < stages; ++s) {
    barrier_wait(&ring.full[place.stage], place.phase);
    wgmma_fence();
    multiply_stage<Element>(d, swizzled_rows(ring.a[place.stage]) + (warpgroup * 64 * kGemmStageBytes >> 4),
                            swizzled_rows(ring.b[place.stage]), s > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (s > 0) release(previous);
    previous = place.stage;
    place.advance();
  }
  wgmma_wait<0>();
  settle(d);
  release(previous);
}

// All 128 rows by one warpgroup, d[0] the upper 64. `issued()` is called once all of the tile's stages have been waited
// for.
template <class Element, class Release, class Issued>
__device__ __forceinline__ void multiply_whole_tile(float (&d)[2][64], GemmRing<128>& ring,
                                                    RingPlace<GemmRing<128>::kStages>& place, int stages,
                                                    Release release, Issued issued) {
  int previous = 0;
  settle(d[0]);
  settle(d[1]);
#pragma unroll 1
  for (int s = 0; s < stages; ++s) {
    barrier_wait(&ring.full[place.stage], place.phase);
    wgmma_fence();
    const uint64_t a = swizzled_rows(ring.a[place.stage]), b = swizzled_rows(ring.b[place.stage]);
#pragma unroll
    for (int i = 0; i < kGemmStageBytes / 32; ++i) {
      wgmma(Element{}, d[0], a + 2 * i, b + 2 * i, s > 0 || i > 0);
      wgmma(Element{}, d[1], a + (64 * kGemmStageBytes >> 4) + 2 * i, b + 2 * i, s > 0 || i > 0);
    }
    wgmma_commit();
    if (s + 1 == stages) issued();
    wgmma_wait<1>();
    if (s > 0) release(previous);
    previous = place.stage;
    place.advance();
  }
  wgmma_wait<0>();
  settle(d[0]);
  settle(d[1]);
  release(previous);
}

// The product of 64 rows with partial sums promoted to FP32.
template <class Element, int kTileN, class Release>
__device__ __forceinline__ void multiply_tile_promoted(float (&d)[kTileN / 2], GemmRing<kTileN>& ring,
                                                       RingPlace<GemmRing<kTileN>::kStages>& place, int warpgroup,
                                                       int stages, Release release) {
  constexpr int kHalves = kTileN / 128;
#pragma unroll
  for (int i = 0; i < kTileN / 2; ++i) d[i] = 0.f;
  float partial[64];
#pragma unroll 1
  for (int s = 0; s < stages; s += kPromotedStages) {
    const int count = min(kPromotedStages, stages - s);
    RingPlace<GemmRing<kTileN>::kStages> after = place;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      after = place;
      settle(partial);
#pragma unroll
      for (int i = 0; i < kPromotedStages; ++i) {
        if (i < count) {
          if (half == 0) barrier_wait(&ring.full[after.stage], after.phase);
          wgmma_fence();
          multiply_stage<Element>(partial, swizzled_rows(ring.a[after.stage]) + (warpgroup * 64 * kGemmStageBytes >> 4),
                                  swizzled_rows(ring.b[after.stage]) + (half * 128 * kGemmStageBytes >> 4), i > 0);
          wgmma_commit();
          after.advance();
        }
      }
      if (half == kHalves - 1 && count == kPromotedStages) {
        wgmma_wait<1>();
        release(place.stage);
      }
      wgmma_wait<0>();
      settle(partial);
#pragma unroll
      for (int i = 0; i < 64; ++i) d[half * 64 + i] += partial[i];
    }
    if (count == kPromotedStages) place.advance();
    release(place.stage);
    place = after;
  }
  settle(d);
}

}  // namespace fut
