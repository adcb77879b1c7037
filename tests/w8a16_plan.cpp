// Prints what csrc/prefill/w8a16_plan.h decides for "m n k sm_count", a line each, for tests/test_w8a16_plan.py; and
// with any argument and "channels tokens splits" behind each, what the model expects of that plan.

#include "prefill/w8a16_plan.h"

#include <iostream>

int main(int count, char**) {
  if (count > 1) {
    int64_t m = 0, n = 0, k = 0;
    int sm_count = 0;
    fut::W8a16Plan plan = {};
    while (std::cin >> m >> n >> k >> sm_count >> plan.channels >> plan.tokens >> plan.splits)
      std::cout << fut::w8a16_clocks(m, n, k, plan, sm_count) << '\n';
    return 0;
  }
  int64_t m = 0, n = 0, k = 0;
  int sm_count = 0;
  while (std::cin >> m >> n >> k >> sm_count) {
    const fut::W8a16Plan plan = fut::plan_w8a16(m, n, k, sm_count);
    std::cout << plan.channels << ' ' << plan.tokens << ' ' << plan.splits << ' '
              << fut::w8a16_workspace_bytes(m, n, plan) << '\n';
  }
}
