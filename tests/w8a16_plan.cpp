// Prints what csrc/prefill/w8a16_plan.h decides for "m n k sm_count", a line each, for tests/test_w8a16_plan.py.

#include "prefill/w8a16_plan.h"

#include <iostream>

int main() {
  int64_t m = 0, n = 0, k = 0;
  int sm_count = 0;
  while (std::cin >> m >> n >> k >> sm_count) {
    const fut::W8a16Plan plan = fut::plan_w8a16(m, n, k, sm_count);
    std::cout << plan.channels << ' ' << plan.tokens << ' ' << plan.splits << ' '
              << fut::w8a16_workspace_bytes(m, n, plan) << '\n';
  }
}
