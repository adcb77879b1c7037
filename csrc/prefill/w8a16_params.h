// What the W8A16 kernel gets besides its tensor maps.

#pragma once

#include "w8a16_plan.h"

namespace fut {

struct W8a16Params {
  const float* alpha;  // [1] or [n]
  const float* bias;   // [n] or null
  uint8_t* out;        // [m, n]
  int64_t out_stride_bytes;
  float* partial;      // [splits][tile][part of 64 channels][kTokens / 8][128 threads][4]
  uint32_t* counters;  // [tile][part of 64 channels]
  int32_t m, n;
  int32_t stages, stages_a_split, splits;
  int32_t channel_tiles, token_tiles;
  int32_t alpha_is_vector;
};

}  // namespace fut
