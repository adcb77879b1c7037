// Copies of boxes with a swizzle (swizzle.h).

#pragma once
#include <cuda.h>

#include "bulk_copy.cuh"
#include "swizzle.h"

namespace fut {

inline void prefetch_tensor_map(const CUtensorMap*) {}

inline void land_box(uint8_t* to, const CUtensorMap& map, int column, int row) {
  for (uint32_t r = 0; r < map.box_rows; ++r)
    for (uint32_t b = 0; b < map.row_bytes; ++b) {
      const uint64_t x = column + b / map.element_bytes, y = static_cast<uint64_t>(row) + r;
      const bool inside = x < map.columns && y < map.rows;
      to[swizzled(r * map.row_bytes + b, map.row_bytes)] = inside ? map.data[y * map.stride + x * map.element_bytes + b % map.element_bytes] : 0;
    }
}

inline void tensor_copy(void* shared, const CUtensorMap* map, int column, int row, uint64_t* barrier) {
  if (reinterpret_cast<uintptr_t>(shared) % (8 * map->row_bytes) != 0) std::abort();
  auto* to = static_cast<uint8_t*>(shared);
  std::memset(to, 0xff, map->box_rows * map->row_bytes);
  emulation::land_later([=, box = *map] { land_box(to, box, column, row); }, map->box_rows * map->row_bytes, barrier);
}

inline void tensor_copy_multicast(void* shared, const CUtensorMap* map, int column, int row, uint64_t* barrier,
                                  uint16_t ctas) {
  for (int rank = 0; rank < 16; ++rank)
    if (ctas >> rank & 1)
      tensor_copy(reinterpret_cast<void*>(emulation::cluster_place(shared, rank)), map, column, row,
                  reinterpret_cast<uint64_t*>(emulation::cluster_place(barrier, rank)));
}

template <int kRegisters>
inline void fewer_registers() {}
template <int kRegisters>
inline void more_registers() {}

inline uint32_t cluster_rank() { return static_cast<uint32_t>(emulation::cluster_rank()); }

}  // namespace fut
