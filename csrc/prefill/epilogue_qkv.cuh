// Q, K and V as attention reads them: q/k norm, RoPE and rounding to BF16; Q by row, K and V into the history's pages.
// Tiles hold whole heads, and a head's halves lie in one thread, so that RoPE needs no exchange.

#pragma once

#include "epilogue.cuh"

namespace fut {

template <int kDim>
struct StoreQkv {
  using Params = QkvParams;
  static constexpr int kHeadDim = kDim;
  static constexpr int kPromotedTileN = 256;
  static constexpr int kColumns8 = kDim / 8;  // eights of columns of a head

  template <int kTileN>
  __device__ __forceinline__ static void store(const Params& p, float (&d)[kTileN / 2],
                                               const EpilogueTile<kTileN>& tile) {
    constexpr int kTileHeads = kTileN / kDim;
#pragma unroll
    for (int head = 0; head < kTileHeads; ++head) {
      const int number = tile.column0 / kDim + head;
      if (number >= p.heads + 2 * p.kv_heads) break;
      const bool turned = number < p.heads + p.kv_heads;
      const float* norm = number < p.heads ? p.q_norm : p.k_norm;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2 x[kColumns8];
#pragma unroll
        for (int j = 0; j < kColumns8; ++j) x[j] = tile.values(d, head * kColumns8 + j, half);
        if (turned) {
          if (norm != nullptr) normalize(x, norm, p.eps, tile.lane);
          if (tile.has_row(half)) turn(x, p, tile.vectors.position[tile.upper + 8 * half], tile.lane);
        }
        store_bf16_row(x, tile.has_row(half) ? place(p, tile, number, half) : nullptr, tile.lane);
      }
    }
  }

  __device__ __forceinline__ static void normalize(float2 (&x)[kColumns8], const float* gain, float eps, int lane) {
    float squares = 0.f;
#pragma unroll
    for (int j = 0; j < kColumns8; ++j) squares += x[j].x * x[j].x + x[j].y * x[j].y;
    squares = reduce_quad(squares, [](float a, float b) { return a + b; });
    const float factor = rsqrtf(__fdiv_rn(squares, static_cast<float>(kDim)) + eps);
#pragma unroll
    for (int j = 0; j < kColumns8; ++j) {
      const float2 g = *reinterpret_cast<const float2*>(gain + 8 * j + 2 * (lane & 3));
      x[j] = {__fmul_rn(__fmul_rn(x[j].x, factor), g.x), __fmul_rn(__fmul_rn(x[j].y, factor), g.y)};
    }
  }

  // Products and sums are rounded one by one, as the reference rounds them.
  __device__ __forceinline__ static void turn(float2 (&x)[kColumns8], const Params& p, int position, int lane) {
    const int64_t row = static_cast<int64_t>(position) * (kDim / 2) + 2 * (lane & 3);
    const auto low = [](float a, float b, float c, float s) { return __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s)); };
    const auto high = [](float a, float b, float c, float s) { return __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s)); };
#pragma unroll
    for (int j = 0; j < kColumns8 / 2; ++j) {
      const float2 c = *reinterpret_cast<const float2*>(p.rope_cos + row + 8 * j);
      const float2 s = *reinterpret_cast<const float2*>(p.rope_sin + row + 8 * j);
      const float2 a = x[j], b = x[j + kColumns8 / 2];
      x[j] = {low(a.x, b.x, c.x, s.x), low(a.y, b.y, c.y, s.y)};
      x[j + kColumns8 / 2] = {high(a.x, b.x, c.x, s.x), high(a.y, b.y, c.y, s.y)};
    }
  }

  template <int kTileN>
  __device__ __forceinline__ static uint8_t* place(const Params& p, const EpilogueTile<kTileN>& tile, int number,
                                                   int half) {
    if (number < p.heads) return p.q + tile.row(half) * p.q_stride_bytes + number * (2 * kDim);
    const bool is_key = number < p.heads + p.kv_heads;
    const int head = number - p.heads - (is_key ? 0 : p.kv_heads);
    const int position = tile.vectors.position[tile.upper + 8 * half];
    const int64_t page = tile.vectors.page[tile.upper + 8 * half];
    const int64_t token = (page * p.kv_heads + head) * FUT_PAGE_TOKENS + position % FUT_PAGE_TOKENS;
    return (is_key ? p.k : p.v) + token * (2 * kDim);
  }
};

}  // namespace fut
