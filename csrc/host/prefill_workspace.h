// Where a prefill keeps what passes between its kernels.

#pragma once

#include <cstdint>

#include "../fut.h"
#include "../prefill/gemm_plan.h"
#include "prefill_input.h"

namespace fut {

// Byte offsets into the workspace, each a multiple of 256.
struct PrefillWorkspace {
  int64_t attention, attention_bytes, input, page_table;
  int64_t run_scale, run_amax;  // [layers * 4, requests]
  int64_t h, square_sums;       // BF16 [rows, hidden]; F32 [rows, square_parts]
  int64_t x;                    // [rows, x_stride]: E4M3 copy of h, or h normalised in BF16
  int64_t q, attended, gated;   // BF16 [rows, heads * head_dim]; [rows, attended_stride]; [rows, gated_stride]
  int64_t bytes = 0;
  int32_t table_width, square_parts;
  int64_t x_stride, attended_stride, gated_stride;  // elements

  PrefillWorkspace(const fut_prefill_config& c, const fut_decoder_config& d) {
    const int64_t rows = c.max_rows, width = int64_t{d.attention.heads} * d.attention.head_dim;
    const int64_t element = c.format == FUT_BF16 ? 2 : 1;
    table_width = static_cast<int32_t>(ceil_divide(d.attention.max_context, FUT_PAGE_TOKENS));
    square_parts = static_cast<int32_t>(ceil_divide(d.hidden, kSquareColumns));
    x_stride = element == 2 ? d.hidden : align_up(d.hidden, 16);
    attended_stride = align_up(width, 16);
    gated_stride = align_up(d.intermediate, 16);
    const auto take = [&](int64_t size) {
      const int64_t at = bytes;
      bytes += align_up(size, 256);
      return at;
    };
    attention_bytes = fut_prefill_attention_workspace_bytes(c.max_requests, c.max_rows, d.attention.heads);
    attention = take(attention_bytes);
    input = take(PrefillInput(c.max_rows, c.max_requests, c.states).bytes);
    page_table = take(int64_t{d.max_slots} * table_width * 4);
    run_scale = take(int64_t{kSites} * d.layers * c.max_requests * 4);
    run_amax = take(int64_t{kSites} * d.layers * c.max_requests * 4);
    h = take(rows * d.hidden * 2);
    square_sums = take(rows * square_parts * 4);
    x = take(rows * x_stride * element);
    q = take(rows * width * 2);
    attended = take(rows * attended_stride * element);
    gated = take(rows * gated_stride * element);
  }
};

}  // namespace fut
