// A warp's 16 rows of attention's output: divided by the softmax's denominator, in BF16, in E4M3, or in both.

#pragma once

#include "attention_walk.cuh"
#include "epilogue.cuh"

namespace fut {

// One row's columns 8 j + 2 (lane % 4) and the next, every lane of a quad holding its share; null: not written.
template <int kEights>
__device__ __forceinline__ void store_e4m3_row(const float2 (&x)[kEights], float inverse, uint8_t* to, int lane) {
#pragma unroll
  for (int block = 0; block < (kEights + 7) / 8; ++block) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = 8 * block + 2 * i;
      w[i] = j < kEights ? pack_e4m3(x[j < kEights ? j : 0].x * inverse, x[j < kEights ? j : 0].y * inverse) : 0u;
      w[i] |= j + 1 < kEights
                  ? pack_e4m3(x[j + 1 < kEights ? j + 1 : 0].x * inverse, x[j + 1 < kEights ? j + 1 : 0].y * inverse)
                        << 16
                  : 0u;
    }
    // Lane q held two columns of each of eight j, two j a word; now it has two j of all four lanes: 16 columns.
    quad_transpose(w, lane);
    const uint32_t bytes[4] = {__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[2], w[3], 0x5410),
                               __byte_perm(w[0], w[1], 0x7632), __byte_perm(w[2], w[3], 0x7632)};
    const int column = 64 * block + 16 * (lane & 3);
    if (to != nullptr && column < 8 * kEights) store_bytes(to + column, bytes, 16);
  }
}

// `row` is the lane's upper row among the chunk's, `sum` what this lane has summed of both rows' denominators.
template <int kDim>
__device__ __forceinline__ void store_attention(const AttentionParams& p, const AttentionTile& tile, int row,
                                                const float (&o)[kDim / 2], const float (&sum)[2], int lane) {
  QuantizedRecord record;
  const float scale_inverse = p.quantized.data != nullptr ? __frcp_rn(p.out_scale[tile.request]) : 0.f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = row + 8 * half, token = own / p.group;
    const bool inside = own < tile.first + tile.rows;
    const int64_t out_row = tile.row0 + token;
    const int column = (tile.kv_head * p.group + own - token * p.group) * kDim;
    const float factor = __frcp_rn(reduce_quad(sum[half], [](float a, float b) { return a + b; }));
    float2 x[kDim / 8];
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) x[j] = {o[4 * j + 2 * half] * factor, o[4 * j + 2 * half + 1] * factor};
    if (p.out != nullptr) store_bf16_row(x, inside ? p.out + out_row * p.out_stride_bytes + 2 * column : nullptr, lane);
    if (p.quantized.data == nullptr) continue;
    if (inside) record.note(x, scale_inverse, half);
    store_e4m3_row(x, scale_inverse, inside ? p.quantized.data + out_row * p.quantized.stride + column : nullptr, lane);
  }
  if (p.quantized.data != nullptr) record.publish(p.quantized, tile.request, lane);
}

}  // namespace fut
