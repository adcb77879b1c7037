// silu(gate) * up in E4M3 or BF16. Rows of the weights are interleaved one by one (row order "interleave1"), so gate
// and up of a channel are neighbouring columns and lie in one thread.

#pragma once

#include "epilogue_plain.cuh"

namespace fut {

__device__ __forceinline__ float swiglu(float gate, float up) {
  constexpr float kLog2E = 1.4426950408889634f;
  return __fdividef(gate * up, 1.f + exp2_fast(-kLog2E * gate));
}

struct SwigluE4m3 {
  using Params = QuantizedOut;
  static constexpr int kHeadDim = 0;
  static constexpr int kPromotedTileN = 256;

  template <int kTileN>
  __device__ __forceinline__ static void store(const Params& p, float (&d)[kTileN / 2],
                                               const EpilogueTile<kTileN>& tile) {
    QuantizedRecord record;
#pragma unroll
    for (int block = 0; block < kTileN / 128; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float inverse = tile.vectors.out_inverse[tile.upper + 8 * half];
        // Lane q holds channels 4 j + q of the block's 16 j: four of them a word.
        uint32_t w[4];
#pragma unroll
        for (int group = 0; group < 4; ++group) {
          float x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 v = tile.values(d, 16 * block + 4 * group + i, half);
            x[i] = swiglu(v.x, v.y);
          }
          record.note(x, inverse, half);
          w[group] = pack_e4m3(x[0] * inverse, x[1] * inverse) | pack_e4m3(x[2] * inverse, x[3] * inverse) << 16;
        }
        quad_transpose(w, tile.lane);
        // Now byte i of w[q] is channel 4 i + q of this lane's 16.
        const uint32_t even01 = __byte_perm(w[0], w[1], 0x5140), odd01 = __byte_perm(w[0], w[1], 0x7362);
        const uint32_t even23 = __byte_perm(w[2], w[3], 0x5140), odd23 = __byte_perm(w[2], w[3], 0x7362);
        w[0] = __byte_perm(even01, even23, 0x5410);
        w[1] = __byte_perm(even01, even23, 0x7632);
        w[2] = __byte_perm(odd01, odd23, 0x5410);
        w[3] = __byte_perm(odd01, odd23, 0x7632);
        const int channel = tile.column0 / 2 + 64 * block + 16 * (tile.lane & 3);
        if (tile.has_row(half))
          store_bytes(p.data + tile.row(half) * p.stride + channel, w, tile.columns / 2 - channel);
      }
    }
    record.publish(p, tile);
  }
};

struct SwigluBf16 {
  using Params = StoreBf16::Params;
  static constexpr int kHeadDim = 0;
  static constexpr int kPromotedTileN = 256;

  template <int kTileN>
  __device__ __forceinline__ static void store(const Params& p, float (&d)[kTileN / 2],
                                               const EpilogueTile<kTileN>& tile) {
#pragma unroll
    for (int group = 0; group < kTileN / 64; ++group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Lane q holds channels 4 j + q of the group's 8 j: those of two neighbouring j a word.
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 first = tile.values(d, 8 * group + 2 * i, half);
          const float2 second = tile.values(d, 8 * group + 2 * i + 1, half);
          w[i] = pack_bf16(swiglu(first.x, first.y), swiglu(second.x, second.y));
        }
        quad_transpose(w, tile.lane);
        // Now w[q] holds channels q and 4 + q of this lane's 8.
        const uint32_t row[4] = {__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[2], w[3], 0x5410),
                                 __byte_perm(w[0], w[1], 0x7632), __byte_perm(w[2], w[3], 0x7632)};
        const int channel = tile.column0 / 2 + 32 * group + 8 * (tile.lane & 3);
        if (tile.has_row(half))
          store_bytes(p.data + tile.row(half) * p.stride_bytes + 2 * channel, row, 2 * (tile.columns / 2 - channel));
      }
    }
  }
};

}  // namespace fut
