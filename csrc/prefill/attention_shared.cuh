// Shared memory of the attention kernel.

#pragma once

#include "../fut.h"
#include "../ptx/bulk_copy.cuh"
#include "attention_walk.cuh"
#include "mainloop.cuh"

namespace fut {

// A row of Q, K or V lies in blocks as wide as the widest swizzle that divides it, so that wgmma reads whole blocks in
// either direction.
template <int kDim>
struct HeadLayout {
  static constexpr int kRowBytes = 2 * kDim % 128 == 0 ? 128 : 2 * kDim % 64 == 0 ? 64 : 32;
  static constexpr int kBlocks = 2 * kDim / kRowBytes;
  static constexpr int kStageBytes = kAttentionKeys * 2 * kDim;
  static constexpr int kFitting = (232448 - 2048 - kAttentionRows * 2 * kDim) / (2 * kStageBytes);
  static constexpr int kStages = kFitting < 4 ? kFitting : 4;
};

template <int kDim>
struct HistoryRing {
  using Layout = HeadLayout<kDim>;
  uint8_t data[Layout::kStages][Layout::kBlocks][kAttentionKeys * Layout::kRowBytes];
  uint64_t full[Layout::kStages], empty[Layout::kStages];
};

inline constexpr int kTileSlots = 4;
inline constexpr int kTileReaders = 11;  // warps that read a tile's slot: eight multiply, two fetch Q, one clears V

template <int kDim>
struct __align__(1024) AttentionShared {
  using Layout = HeadLayout<kDim>;
  uint8_t q[2][Layout::kBlocks][64 * Layout::kRowBytes];  // by warpgroup
  HistoryRing<kDim> k;
  alignas(1024) HistoryRing<kDim> v;
  AttentionTile tiles[kTileSlots];
  uint64_t tile_full[kTileSlots], tile_empty[kTileSlots];
  uint64_t q_full[2], q_empty[2];
  uint64_t v_landed[Layout::kStages];  // a step whose last rows are cleared before it is full

  // One thread.
  __device__ __forceinline__ void init() {
    for (int i = 0; i < Layout::kStages; ++i) {
      for (HistoryRing<kDim>* ring : {&k, &v}) {
        barrier_init(&ring->full[i], 1);
        barrier_init(&ring->empty[i], 8);
      }
      barrier_init(&v_landed[i], 1);
    }
    for (int i = 0; i < kTileSlots; ++i) {
      barrier_init(&tile_full[i], 1);
      barrier_init(&tile_empty[i], kTileReaders);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(&q_full[i], 1);
      barrier_init(&q_empty[i], 4);
    }
  }
};

template <int kDim>
using HistoryPlace = RingPlace<HeadLayout<kDim>::kStages>;

}  // namespace fut
