// What a GEMM's kernel gets besides its tensor maps.

#pragma once

#include <cstdint>

#include "gemm_plan.h"

namespace fut {

struct GemmShape {
  int32_t m, n, stages;  // stages of K
  int32_t step;          // columns by which tiles advance
  int32_t cluster;
  TileOrder order;  // of clusters' tiles
};

// Where the tokens of the rows belong; null pointers where the epilogue does not ask.
struct GemmTokens {
  const int32_t* position;    // [m]
  const int32_t* slot;        // [m]: row of the page table
  const int32_t* page_table;  // [slots, table_width]
  int32_t table_width;
};

// Factors of rows and columns. Null pointers stand for ones, a null bias for zeros.
struct GemmScales {
  const float* row_factor;     // [m]
  const float* square_sums;    // [m, square_parts]: the row factor is 1 / sqrt(sum / columns + eps); or null
  const float* a_scale;        // [requests]
  const int32_t* row_request;  // [m], or null: all rows belong to request 0
  const float* channel_scale;  // [n]
  const float* bias;           // [n]
  const float* out_scale;      // [requests] of the E4M3 output
  int32_t square_parts;
  float inverse_columns, eps;
  GemmTokens tokens;
};

// An E4M3 output and what is recorded about it.
struct QuantizedOut {
  uint8_t* data;
  int64_t stride;
  uint32_t* amax;                 // [requests] bits of FP32 maxima, which order as the numbers do; or null
  unsigned long long* saturated;  // or null
};

struct ResidualParams {
  const uint8_t* residual;  // BF16; may be `out`
  uint8_t* out;             // BF16
  int64_t residual_stride_bytes, out_stride_bytes;
  QuantizedOut quantized;  // data null: none
  float* square_sums;      // [m, square_parts] or null
  int32_t square_parts;
};

struct QkvParams {
  uint8_t* q;             // BF16 [m, heads * head_dim]
  uint8_t* k;             // BF16 [pages, kv_heads, FUT_PAGE_TOKENS, head_dim]
  uint8_t* v;             // the same
  const float* q_norm;    // [head_dim] or null
  const float* k_norm;    // [head_dim] or null
  const float* rope_cos;  // [positions, head_dim / 2]
  const float* rope_sin;
  int64_t q_stride_bytes;
  int32_t heads, kv_heads;
  float eps;
};

}  // namespace fut
