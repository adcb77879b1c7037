// What the attention kernel gets besides its tensor maps.

#pragma once

#include <cstdint>

#include "gemm_params.h"

namespace fut {

struct AttentionParams {
  const uint8_t* q;  // BF16 [rows, heads * head_dim]
  uint8_t* out;      // the same in BF16, or null
  int64_t out_stride_bytes;
  QuantizedOut quantized;         // data null: none
  const float* out_scale;         // [requests]
  const int32_t* first_row;       // [requests + 1]
  const int32_t* first_position;  // [requests]
  const int32_t* slot;            // [requests]
  const int32_t* page_table;      // [slots, table_width]
  int32_t table_width, requests;
  int32_t kv_heads, group;  // query heads of a KV head
  int32_t no_row;           // a row past the history's last, which reads as zeros
  float scale_log2;         // of scores: log2(e) / sqrt(head_dim)
  uint32_t* counters;       // tiles given out beyond each CTA's first, CTAs that want no more; zero before and after
};

}  // namespace fut
