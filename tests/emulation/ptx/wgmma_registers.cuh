// wgmma with A in registers: they are read at the wait, so that a write before it shows.

#pragma once
#include "wgmma.cuh"

namespace fut {

struct Fp16 {
  static constexpr int kBytes = 2;
};

inline uint16_t wgmma_bits(const uint8_t* place) { return static_cast<uint16_t>(place[0] | place[1] << 8); }

// `place(n, k)` is where a 16-bit element of B lies.
template <class Element, int kCount, class Place>
inline void wgmma_from_registers(float (&d)[kCount], const uint32_t (&a)[4], bool accumulate, Place place) {
  constexpr bool kHalf = std::is_same_v<Element, Fp16>;
  const int lane = emulation::lane();
  float* const out = d;
  const uint32_t* const registers = a;
  // A row lies in the four threads of a quad, so all of a warp's are gathered; every lane of a warp waits together.
  wgmma_queue().open.push_back([=] {
    double rows[2][16];
    for (int r = 0; r < 4; ++r) {
      const uint64_t* all = emulation::warp_gather(registers[r]);
      for (int t = 0; t < 4; ++t)
        for (int h = 0; h < 2; ++h) rows[r & 1][2 * t + h + 8 * (r >> 1)] = element<kHalf>(all[(lane & ~3) + t], h);
    }
    for (int j = 0; j < kCount / 4; ++j)
      for (int e = 0; e < 2; ++e) {
        double sums[2] = {accumulate ? out[4 * j + e] : 0.0, accumulate ? out[4 * j + 2 + e] : 0.0};
        for (int k = 0; k < 16; ++k) {
          const double other = element<kHalf>(wgmma_bits(place(8 * j + 2 * (lane & 3) + e, k)), 0);
          for (int half = 0; half < 2; ++half) sums[half] += rows[half][k] * other;
        }
        out[4 * j + e] = static_cast<float>(sums[0]);
        out[4 * j + 2 + e] = static_cast<float>(sums[1]);
      }
  });
}

template <class Element, int kCount>
inline void wgmma(Element, float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  wgmma_from_registers<Element>(d, a, accumulate, [=](int n, int k) { return wgmma_place(b, n, 2 * k); });
}

template <class Element, int kCount>
inline void wgmma_transposed(Element, float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  wgmma_from_registers<Element>(d, a, accumulate, [=](int n, int k) { return wgmma_transposed_place(b, k, n); });
}

}  // namespace fut
