// Warpgroup MMA: a thread works out its own accumulators when it waits for them, the last moment at which the operands
// must still lie there; sums in FP64.

#pragma once
#include <vector>

#include "bulk_copy.cuh"
#include "mma.cuh"
#include "swizzle.h"

namespace fut {

struct E4m3 {
  static constexpr int kBytes = 1;
};
struct Bf16 {
  static constexpr int kBytes = 2;
};

// Descriptors count 16 bytes and have the swizzle on top, as the card's do; from bit 44 on, the bytes between blocks of
// columns.
inline constexpr int kDescriptorBlock = 44;
template <int kRowBytes = 128>
inline uint64_t swizzled_rows(const void* shared) {
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  if (reinterpret_cast<uint64_t>(shared) % (8 * kRowBytes) != 0) std::abort();
  return reinterpret_cast<uint64_t>(shared) >> 4 | kSwizzle << 62;
}
template <int kRowBytes, int kBlockBytes>
inline uint64_t swizzled_columns(const void* shared) {
  return swizzled_rows<kRowBytes>(shared) | static_cast<uint64_t>(kBlockBytes >> 4) << kDescriptorBlock;
}
inline void wgmma_fence() {}

using WgmmaGroup = std::vector<std::function<void()>>;
struct WgmmaQueue {
  WgmmaGroup open;
  std::vector<WgmmaGroup> committed;
};
inline WgmmaQueue& wgmma_queue() {
  return *static_cast<WgmmaQueue*>(emulation::fiber_local([]() -> void* { return new WgmmaQueue; }));
}

inline void wgmma_commit() {
  wgmma_queue().committed.push_back(std::move(wgmma_queue().open));
  wgmma_queue().open.clear();
}

template <int kPending>
inline void wgmma_wait() {
  auto& committed = wgmma_queue().committed;
  while (committed.size() > kPending) {
    for (const auto& work : committed.front()) work();
    committed.erase(committed.begin());
  }
}

template <int kCount>
inline void settle(float (&)[kCount]) {}

// The byte `offset` bytes along row `row` of what a descriptor describes.
inline const uint8_t* wgmma_place(uint64_t descriptor, int row, int offset) {
  const uint32_t row_bytes = 256u >> (descriptor >> 62);
  const uint64_t first = (descriptor & ((1ull << kDescriptorBlock) - 1)) << 4;
  return reinterpret_cast<const uint8_t*>(swizzled(first + row * row_bytes + offset, row_bytes));
}

// The same of the two bytes of column n, where rows lie along N.
inline const uint8_t* wgmma_transposed_place(uint64_t descriptor, int row, int n) {
  const int columns = 128 >> (descriptor >> 62);  // of a block
  const uint64_t block = (descriptor >> kDescriptorBlock & 0x3ffff) << 4;
  return wgmma_place(descriptor + (n / columns * block >> 4), row, n % columns * 2);
}

template <class Element>
inline float wgmma_element(uint64_t descriptor, int row, int k) {
  const uint8_t* place = wgmma_place(descriptor, row, k * Element::kBytes);
  if constexpr (Element::kBytes == 1) {
    return (*place & 0x7f) == 0x7f ? NAN : e4m3_value(*place);
  } else {
    return __uint_as_float(static_cast<uint32_t>(place[0] | place[1] << 8) << 16);
  }
}

template <class Element, int kCount>
inline void wgmma(Element, float (&d)[kCount], uint64_t a, uint64_t b, bool accumulate) {
  constexpr int kK = 32 / Element::kBytes;
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  float* const out = d;
  wgmma_queue().open.push_back([=] {
    float rows[2][kK];
    for (int half = 0; half < 2; ++half)
      for (int k = 0; k < kK; ++k) rows[half][k] = wgmma_element<Element>(a, thread / 32 * 16 + lane / 4 + 8 * half, k);
    for (int j = 0; j < kCount / 4; ++j)
      for (int e = 0; e < 2; ++e) {
        double sums[2] = {accumulate ? out[4 * j + e] : 0.0, accumulate ? out[4 * j + 2 + e] : 0.0};
        for (int k = 0; k < kK; ++k) {
          const float other = wgmma_element<Element>(b, 8 * j + 2 * (lane & 3) + e, k);
          for (int half = 0; half < 2; ++half) sums[half] += static_cast<double>(rows[half][k]) * other;
        }
        out[4 * j + e] = static_cast<float>(sums[0]);
        out[4 * j + 2 + e] = static_cast<float>(sums[1]);
      }
  });
}

}  // namespace fut
