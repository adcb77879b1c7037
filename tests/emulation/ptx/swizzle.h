// Where a byte of swizzled rows lies: of rows of 128 bytes the 16 bytes number i of row r are at number i ^ (r % 8), of
// 64 bytes at i ^ (r / 2 % 4), of 32 at i ^ (r / 4 % 2). Addresses: rows begin at a multiple of eight rows.

#pragma once

#include <cstdint>

namespace fut {

inline uint64_t swizzled(uint64_t address, uint32_t row_bytes) {
  return address ^ (address >> 7 & (row_bytes / 16 - 1)) << 4;
}

}  // namespace fut
