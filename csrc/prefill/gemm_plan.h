// Which tile a product gets, and in which order tiles are computed. Needs nothing but C++17, so that a host compiler
// can test it (tests/test_gemm_plan.py).

#pragma once

#include <cstdint>

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

// What a tile costs, in clocks of an SM. Fitted to one H200, cuBLASLt's shapes; benchmarks/NOTES.md, prefill.
struct GemmCost {
  static constexpr double kTensorBytes = 32.0;  // bytes of a row of B times 128 rows of A that a clock multiplies
  static constexpr double kL2Bytes = 44.0;      // bytes a clock and SM from the L2
  static constexpr double kTileClocks = 2200;   // fill, epilogue and drain of a tile
  static constexpr double kCardBytes = 2400.0;  // bytes a clock of the whole card from memory
};

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

// Columns by which tiles advance: whole heads of `head_dim`, where no head may straddle two tiles (0: the tile's own).
FUT_HD constexpr int tile_step(int tile_n, int head_dim) {
  return head_dim == 0 ? tile_n : tile_n / head_dim * head_dim;
}

constexpr double gemm_clocks(int64_t m, int64_t n, int64_t k_bytes, int step, int tile_n, int cluster, int sm_count) {
  const int64_t tiles = ceil_divide(m, kGemmTileM * cluster) * ceil_divide(n, step);
  const int64_t waves = ceil_divide(tiles, sm_count / cluster);
  const double stages = static_cast<double>(ceil_divide(k_bytes, kGemmStageBytes));
  const double tensor = tile_n * kGemmStageBytes / GemmCost::kTensorBytes;
  const double loaded = (kGemmTileM + static_cast<double>(tile_n) / cluster) * kGemmStageBytes / GemmCost::kL2Bytes;
  const double compute =
      static_cast<double>(waves) * (stages * (tensor > loaded ? tensor : loaded) + GemmCost::kTileClocks);
  const double memory = static_cast<double>((m + n) * k_bytes) / GemmCost::kCardBytes + GemmCost::kTileClocks;
  // Few SMs do not reach the card's bandwidth.
  const int64_t busy = tiles * cluster < sm_count ? tiles * cluster : sm_count;
  const double reached = memory * sm_count / static_cast<double>(busy);
  return compute > reached ? compute : reached;
}

// The cheapest tile, of at most `widest` columns, for A [m, k] and B [n, k] with rows of k_bytes.
constexpr GemmPlan plan_gemm(int64_t m, int64_t n, int64_t k_bytes, int head_dim, int sm_count, int widest = 256) {
  GemmPlan best = {0, 0, 0, 0};
  for (const int tile_n : {256, 128}) {
    if (tile_n > widest) continue;
    for (const int cluster : {2, 1}) {
      if (cluster == 2 && m <= kGemmTileM) continue;
      const int step = tile_step(tile_n, head_dim);
      const double clocks = gemm_clocks(m, n, k_bytes, step, tile_n, cluster, sm_count);
      if (best.tile_n == 0 || clocks < static_cast<double>(best.clocks))
        best = {tile_n, cluster, 2048 / (kGemmTileM * cluster), static_cast<float>(clocks)};
    }
  }
  return best;
}

}  // namespace fut
