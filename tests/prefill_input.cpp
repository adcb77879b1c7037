// Prints what csrc/host/prefill_input.h makes of chunks, an array a line, for tests/test_prefill_input.py. Reads
// "states requests", then "slot position length head ended" for each request. Tokens are 1000 + row.

#include "host/prefill_input.h"

#include <iostream>
#include <vector>

int main() {
  int32_t states = 0, requests = 0;
  std::cin >> states >> requests;
  std::vector<int32_t> slot, position, length, token, head, ended;
  int32_t rows = 0;
  for (int32_t i = 0; i < requests; ++i) {
    int32_t values[5] = {};
    for (int32_t& value : values) std::cin >> value;
    slot.push_back(values[0]);
    position.push_back(values[1]);
    length.push_back(values[2]);
    rows += values[2];
    if (values[3] != 0) head.push_back(i);
    if (values[4] != 0) ended.push_back(values[0]);
  }
  for (int32_t i = 0; i < rows; ++i) token.push_back(1000 + i);
  fut_prefill_chunks c = {};
  c.requests = requests;
  c.slot = slot.data();
  c.position = position.data();
  c.length = length.data();
  c.token = token.data();
  c.head = head.data();
  c.head_count = static_cast<int32_t>(head.size());
  c.ended = ended.data();
  c.ended_count = static_cast<int32_t>(ended.size());

  const fut::PrefillInput input(rows, requests, states);
  std::vector<uint8_t> bytes(static_cast<size_t>(input.bytes), 0xee);
  const int32_t spans = input.fill(c, states, bytes.data());
  const auto line = [&](int64_t offset, int32_t count) {
    const auto* numbers = reinterpret_cast<const int32_t*>(bytes.data() + offset);
    for (int32_t i = 0; i < count; ++i) std::cout << numbers[i] << ' ';
    std::cout << '\n';
  };
  for (const int64_t offset : {input.token, input.position, input.slot, input.request}) line(offset, rows);
  line(input.first_row, requests + 1);
  for (const int64_t offset : {input.first_position, input.request_slot, input.state}) line(offset, requests);
  line(input.head_row, c.head_count);
  line(input.ended, fut::PrefillInput::ended_states(c, states));
  line(input.spans, 4 * spans);
  std::cout << (input.spans + spans * static_cast<int64_t>(sizeof(fut_page_span)) <= input.bytes) << '\n';
}
