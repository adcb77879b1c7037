// From accumulators to rows: a quad (four lanes) holds neighbouring columns of a row, two a lane; here each lane gets
// 16 bytes in a row, so that loads and stores are wide.

#pragma once

#include <cstdint>

#include "../ptx/pack.cuh"

namespace fut {

// w[i] of lane q of the quad becomes w[q] of lane i. Its own inverse.
__device__ __forceinline__ void quad_transpose(uint32_t (&w)[4], int lane) {
  const bool odd = lane & 1, high = lane & 2;
  const uint32_t a = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1);
  const uint32_t b = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
  w[0] = odd ? a : w[0];
  w[1] = odd ? w[1] : a;
  w[2] = odd ? b : w[2];
  w[3] = odd ? w[3] : b;
  const uint32_t c = __shfl_xor_sync(~0u, high ? w[0] : w[2], 2);
  const uint32_t d = __shfl_xor_sync(~0u, high ? w[1] : w[3], 2);
  w[0] = high ? c : w[0];
  w[1] = high ? d : w[1];
  w[2] = high ? w[2] : c;
  w[3] = high ? w[3] : d;
}

// The first `bytes` (any number, also none) of 16 bytes to or from global memory; whole where they are 16.
__device__ __forceinline__ void store_bytes(void* to, const uint32_t (&w)[4], int bytes) {
  if (bytes >= 16) {
    *static_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < bytes; ++i) {
    const uint32_t word = i < 8 ? (i < 4 ? w[0] : w[1]) : (i < 12 ? w[2] : w[3]);
    static_cast<uint8_t*>(to)[i] = static_cast<uint8_t>(word >> i % 4 * 8);
  }
}

// One row in BF16: columns 8 j + 2 (lane % 4) and the next of x[j], every lane of a quad with its share. Null: only the
// exchange.
template <int kEights>
__device__ __forceinline__ void store_bf16_row(const float2 (&x)[kEights], uint8_t* to, int lane) {
#pragma unroll
  for (int group = 0; group < (kEights + 3) / 4; ++group) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = 4 * group + i;
      w[i] = j < kEights ? pack_bf16(x[j < kEights ? j : 0].x, x[j < kEights ? j : 0].y) : 0u;
    }
    quad_transpose(w, lane);
    const int j = 4 * group + (lane & 3);
    if (to != nullptr && j < kEights) store_bytes(to + 16 * j, w, 16);
  }
}

__device__ __forceinline__ void load_bytes(const void* from, uint32_t (&w)[4], int bytes) {
  if (bytes >= 16) {
    const uint4 whole = *static_cast<const uint4*>(from);
    w[0] = whole.x, w[1] = whole.y, w[2] = whole.z, w[3] = whole.w;
    return;
  }
  w[0] = w[1] = w[2] = w[3] = 0;
#pragma unroll 1
  for (int i = 0; i < bytes; ++i) {
    const uint32_t byte = static_cast<uint32_t>(static_cast<const uint8_t*>(from)[i]) << i % 4 * 8;
    if (i < 4)
      w[0] |= byte;
    else if (i < 8)
      w[1] |= byte;
    else if (i < 12)
      w[2] |= byte;
    else
      w[3] |= byte;
  }
}

template <class Value, class Combine>
__device__ __forceinline__ Value reduce_quad(Value value, Combine combine) {
  value = combine(value, __shfl_xor_sync(~0u, value, 1));
  return combine(value, __shfl_xor_sync(~0u, value, 2));
}

}  // namespace fut
