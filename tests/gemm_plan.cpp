// Prints what csrc/prefill/gemm_plan.h decides, for tests/test_gemm_plan.py.
//
// Input, a line each: "plan m n k_bytes head_dim sm_count promoted widest" or "order rows columns group".

#include "prefill/gemm_plan.h"

#include <iostream>
#include <string>

int main() {
  std::string kind;
  while (std::cin >> kind) {
    if (kind == "plan") {
      fut::GemmRequest r{};
      std::cin >> r.m >> r.n >> r.k_bytes >> r.head_dim >> r.sm_count >> r.promoted >> r.widest;
      const fut::GemmPlan plan = fut::plan_gemm(r);
      std::cout << plan.tile_n << ' ' << plan.cluster << ' ' << plan.group_m << ' ' << plan.clocks << '\n';
    } else {
      fut::TileOrder order{};
      std::cin >> order.rows >> order.columns >> order.group;
      for (int i = 0; i < order.count(); ++i)
        std::cout << order.at(i).row << ',' << order.at(i).column << (i + 1 < order.count() ? ' ' : '\n');
    }
  }
}
