// What a run over prompts needs from the host: every row's token and place, every request's rows, and the pages that
// chunks touch. Needs nothing but C++17, so that a host compiler can test it (tests/test_prefill_input.py).

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../fut.h"
#include "../prefill/gemm_plan.h"

namespace fut {

constexpr int64_t align_up(int64_t value, int64_t multiple) { return ceil_divide(value, multiple) * multiple; }

// Byte offsets of arrays that are copied to the card in one piece.
struct PrefillInput {
  int64_t token, position, slot, request;                            // [rows]
  int64_t first_row, first_position, request_slot, state, head_row;  // [requests], and one more row
  int64_t ended;                                                     // [states]
  int64_t spans;                                                     // fut_page_span, as many as chunks can touch
  int64_t bytes = 0;

  PrefillInput(int32_t max_rows, int32_t max_requests, int32_t states) {
    const auto take = [&](int64_t size) {
      const int64_t at = bytes;
      bytes += align_up(size, 16);
      return at;
    };
    for (int64_t* rows : {&token, &position, &slot, &request}) *rows = take(int64_t{max_rows} * 4);
    for (int64_t* requests : {&first_row, &first_position, &request_slot, &state, &head_row})
      *requests = take((int64_t{max_requests} + 1) * 4);
    ended = take(int64_t{states} * 4);
    // A chunk's first and last page may be touched in part.
    const int64_t most_spans = max_rows / FUT_PAGE_TOKENS + 2 * int64_t{max_requests};
    spans = take(most_spans * static_cast<int64_t>(sizeof(fut_page_span)));
  }

  // Writes the arrays; returns the number of spans. `states`: 1 where all requests share one.
  int32_t fill(const fut_prefill_chunks& c, int32_t states, uint8_t* to) const {
    const auto ints = [&](int64_t offset) { return reinterpret_cast<int32_t*>(to + offset); };
    auto* span = reinterpret_cast<fut_page_span*>(to + spans);
    int32_t row = 0, count = 0, heads = 0;
    for (int32_t i = 0; i < c.requests; ++i) {
      const int32_t slot_of = c.slot[i], begin = c.position[i], end = begin + c.length[i];
      ints(first_row)[i] = row;
      ints(first_position)[i] = begin;
      ints(request_slot)[i] = slot_of;
      ints(state)[i] = states == 1 ? 0 : slot_of;
      for (int32_t at = begin; at < end;) {
        const int32_t first = at % FUT_PAGE_TOKENS, tokens = std::min(FUT_PAGE_TOKENS - first, end - at);
        span[count++] = {slot_of, at / FUT_PAGE_TOKENS, first, tokens};
        at += tokens;
      }
      for (int32_t at = begin; at < end; ++at, ++row) {
        ints(position)[row] = at;
        ints(slot)[row] = slot_of;
        ints(request)[row] = i;
      }
      if (heads < c.head_count && c.head[heads] == i) ints(head_row)[heads++] = row - 1;
    }
    ints(first_row)[c.requests] = row;
    std::memcpy(to + token, c.token, row * sizeof(int32_t));
    for (int32_t i = 0; i < ended_states(c, states); ++i) ints(ended)[i] = states == 1 ? 0 : c.ended[i];
    return count;
  }

  static int32_t ended_states(const fut_prefill_chunks& c, int32_t states) {
    return states == 1 ? std::min(c.ended_count, 1) : c.ended_count;
  }
};

}  // namespace fut
