// Which tile a product gets, and in which order tiles are computed. Needs nothing but C++17, so that a host compiler
// can test it (tests/test_gemm_plan.py).

#pragma once

#include <cstdint>
#include <initializer_list>

#include "../format.h"

namespace fut {

inline constexpr int kGemmTileM = 128;       // rows of a CTA's tile: two consumer warpgroups of 64
inline constexpr int kGemmStageBytes = 128;  // of K that a stage holds: 128 E4M3 or 64 BF16 elements
inline constexpr int kSquareColumns = 128;   // columns whose squares one partial sum adds

struct GemmPlan {
  int32_t tile_n;   // 256 or 128
  int32_t cluster;  // CTAs that lie one below the other and share the rows of B: 1 or 2
  int32_t group_m;  // clusters' rows of tiles that are walked down before the next column of tiles
  float clocks;     // what the model expects
};

FUT_HD constexpr int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tiles walk down group_m rows of tiles, then one column to the right: what is in flight at once is nearly square, so
// that few distinct rows of A and B pass through the L2. There are less than 2^31 tiles, group * columns included.
struct TileOrder {
  int32_t rows, columns, group;

  struct Place {
    int32_t row, column;
  };

  FUT_HD constexpr int32_t count() const { return rows * columns; }

  FUT_HD constexpr Place at(int32_t index) const {
    const int32_t a_group = group * columns;
    const int32_t number = index / a_group, rest = index - number * a_group;
    const int32_t first = number * group;
    const int32_t height = rows - first < group ? rows - first : group;
    return {first + rest % height, rest / height};
  }
};

// Clusters' rows of tiles in a group: 2048 rows.
FUT_HD constexpr int32_t group_rows(int cluster) { return 2048 / (kGemmTileM * cluster); }

// Columns by which tiles advance: whole heads of `head_dim`, where no head may straddle two tiles (0: the tile's own).
FUT_HD constexpr int tile_step(int tile_n, int head_dim) {
  return head_dim == 0 ? tile_n : tile_n / head_dim * head_dim;
}

// What is asked of the model. k_bytes: of a row of A or B. promoted: E4M3 sums, see mainloop.cuh; the tensor cores then
// need both warpgroups at once, which share a tile of 128 columns instead of taking turns. widest: most columns of a
// tile.
struct GemmRequest {
  int64_t m, n, k_bytes;
  int head_dim, sm_count;
  bool promoted;
  int widest = 256;
};

// Clocks, fitted to one H200 (benchmarks/results/prefill-gemm-tiles.jsonl; tests/test_gemm_plan.py holds the choices
// against it).
struct GemmCost {
  static constexpr double kColumnStage = 4.0;     // a stage of one column: 128 rows by 128 bytes in the tensor cores
  static constexpr double kInTurn = 1.033;        // times more where one warpgroup multiplies a whole tile
  static constexpr double kFinish = 1500.0;       // from a tile's last product to the next tile's first
  static constexpr double kFinishColumn = 9.4;    // and for each column: the epilogue
  static constexpr double kL2Bytes = 64.0;        // bytes a clock and SM from the L2
  static constexpr double kMemoryBytes = 2400.0;  // bytes a clock of the card from memory
};

constexpr double gemm_clocks(const GemmRequest& r, int tile_n, int cluster) {
  const int64_t tiles = ceil_divide(r.m, kGemmTileM * cluster) * ceil_divide(r.n, tile_step(tile_n, r.head_dim));
  const double waves = static_cast<double>(ceil_divide(tiles, r.sm_count / cluster));
  const double stages = static_cast<double>(ceil_divide(r.k_bytes, kGemmStageBytes));
  const bool in_turn = tile_n == 128 && !r.promoted && waves > 1.0;
  const double tensor = GemmCost::kColumnStage * tile_n * (in_turn ? GemmCost::kInTurn : 1.0);
  const double loaded = (kGemmTileM + static_cast<double>(tile_n) / cluster) * kGemmStageBytes / GemmCost::kL2Bytes;
  const double finish = GemmCost::kFinish + GemmCost::kFinishColumn * tile_n;
  const double multiply = stages * (tensor > loaded ? tensor : loaded);
  // Taking turns, the warpgroups hide all epilogues but the last.
  const double compute = in_turn ? waves * multiply + finish : waves * (multiply + finish);
  // Few SMs do not reach the card's bandwidth.
  const int64_t busy = tiles * cluster < r.sm_count ? tiles * cluster : r.sm_count;
  const double bytes = static_cast<double>((r.m + r.n) * r.k_bytes) * r.sm_count / static_cast<double>(busy);
  const double memory = bytes / GemmCost::kMemoryBytes + finish;
  return compute > memory ? compute : memory;
}

// The cheapest tile; of equals the narrower, and the pair, which loads less.
constexpr GemmPlan plan_gemm(const GemmRequest& r) {
  GemmPlan best = {0, 0, 0, 0};
  double fewest = 0;
  for (const int tile_n : {128, 256}) {
    for (const int cluster : {2, 1}) {
      if (tile_n > r.widest || (cluster == 2 && r.m <= kGemmTileM)) continue;
      const double clocks = gemm_clocks(r, tile_n, cluster);
      if (best.tile_n != 0 && clocks >= fewest) continue;
      fewest = clocks;
      best = {tile_n, cluster, group_rows(cluster), static_cast<float>(clocks)};
    }
  }
  return best;
}

}  // namespace fut
