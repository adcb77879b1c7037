// How the rows of a chunk are cut into tiles, and which tiles are long. Needs nothing but C++17, so that a host
// compiler can test it (tests/test_attention_plan.py).

#pragma once

#include <cstdint>

#include "../format.h"

namespace fut {

inline constexpr int kAttentionRows = 128;  // of a tile: two warpgroups of 64
inline constexpr int kAttentionKeys = 128;  // of a step: two pages
// Above every level.
inline constexpr int kNoLevel = 1 << 23;

// The tiles of a request's chunk for one KV head. Their rows are its query heads of the first token, of the second, and
// so on: a tile is full whatever the number of heads, and short chunks take few tiles. A tile's level is the number of
// steps that it takes; no two neighbours are more than one level apart.
struct ChunkTiles {
  int32_t position;  // of the chunk's first token
  int32_t tokens;
  int32_t group;  // query heads of a KV head

  FUT_HD constexpr int32_t rows() const { return tokens * group; }
  FUT_HD constexpr int32_t count() const { return (rows() + kAttentionRows - 1) / kAttentionRows; }
  // Keys that the tile's last row attends to.
  FUT_HD constexpr int32_t keys(int32_t tile) const {
    const int32_t end = (tile + 1) * kAttentionRows;
    return position + ((end < rows() ? end : rows()) - 1) / group + 1;
  }
  FUT_HD static constexpr int32_t level_of(int32_t keys) { return (keys + kAttentionKeys - 1) / kAttentionKeys; }
  // Tiles of this level or a lower one: the first ones.
  FUT_HD constexpr int32_t up_to(int32_t level) const {
    const int32_t seen = level * kAttentionKeys - position;
    if (seen >= tokens) return count();
    return seen <= 0 ? 0 : seen * group / kAttentionRows;
  }
  // The highest level below this one that has tiles, or 0.
  FUT_HD constexpr int32_t below(int32_t level) const {
    if (tokens <= 0) return 0;
    const int32_t top = level_of(position + tokens);
    const int32_t highest = level - 1 < top ? level - 1 : top;
    return highest >= level_of(keys(0)) ? highest : 0;
  }
};

}  // namespace fut
