// Where a decoder keeps what passes between its kernels.

#pragma once

#include <cstdint>

#include "../decode/attention.cuh"
#include "../fut.h"

namespace fut {

// What a step needs from the host, copied in one piece: the rows, the head's rows, and how to choose tokens.
struct StepInput {
  int64_t token, position, slot, head_row, sampling, bytes;  // byte offsets

  explicit StepInput(int max_rows) {
    const int64_t ints = (static_cast<int64_t>(max_rows) * 4 + 15) / 16 * 16;
    token = 0;
    position = ints;
    slot = 2 * ints;
    head_row = 3 * ints;
    sampling = 4 * ints;
    bytes = sampling + max_rows * static_cast<int64_t>(sizeof(fut_sampling));
  }
};

// Byte offsets into the workspace, each a multiple of 256.
struct DecoderWorkspace {
  int64_t attention, input, page_table, tokens, h, square_sums, qkv, attended, gated, logits, bytes;
  int32_t table_width, square_parts;

  explicit DecoderWorkspace(const fut_decoder_config& c) {
    const int64_t rows = c.max_rows, dim = c.attention.head_dim;
    table_width = (c.attention.max_context + FUT_PAGE_TOKENS - 1) / FUT_PAGE_TOKENS;
    square_parts = (c.hidden + 15) / 16;
    bytes = 0;
    const auto take = [&](int64_t size) {
      const int64_t at = bytes;
      bytes += (size + 255) / 256 * 256;
      return at;
    };
    attention = take(attention_workspace_bytes(c.attention, c.max_rows));
    input = take(StepInput(c.max_rows).bytes);
    page_table = take(static_cast<int64_t>(c.max_slots) * table_width * 4);
    tokens = take(rows * 4);
    h = take(rows * c.hidden * 2);
    square_sums = take(rows * square_parts * 4);
    qkv = take(rows * (c.attention.heads + 2 * c.attention.kv_heads) * dim * 4);
    attended = take(rows * c.attention.heads * dim * 2);
    gated = take(rows * c.intermediate * 2);
    logits = take(rows * static_cast<int64_t>(c.vocab) * 4);
  }
};

}  // namespace fut
