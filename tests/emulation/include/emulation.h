// Runs CUDA kernels on the host: a fiber a thread, warps in random order, copies that land at random times.
//
// What it finds: wrong indices, missing barriers, phases of barriers that are taken for others, deadlocks. What it does
// not: the memory model, bank conflicts, speed. The kernels' sources are compiled as C++ with the wrappers of csrc/ptx
// replaced by those in tests/emulation/ptx.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

#define __CUDACC__ 1
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __shared__ static

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

template <class T>
inline T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
inline T max(T a, T b) {
  return a > b ? a : b;
}

extern thread_local dim3 threadIdx, blockIdx;
extern dim3 gridDim, blockDim;

namespace emulation {

// Launches a grid; CTAs of a cluster run side by side. Aborts with the state of all barriers where nobody can go on.
void launch(dim3 grid, int threads, int cluster, std::function<void()> body);

uint8_t* shared_memory();                       // of the calling thread's CTA
uint64_t cluster_place(const void*, int rank);  // the same place in another CTA of the cluster
void* pointer_of(uint64_t place);

void yield();
const uint64_t* warp_gather(uint64_t value);  // all lanes' values; every lane calls it
void cta_barrier(int id, int threads);
void cta_barrier_arrive(int id, int threads);  // without waiting
void cluster_barrier();

void barrier_init(uint64_t* barrier, uint32_t arrivals);
void barrier_arrive(uint64_t* barrier);
void barrier_expect(uint64_t* barrier, uint32_t bytes);
bool barrier_passed(uint64_t* barrier, uint32_t parity);
// Lands some time later, then counts its bytes at the barrier. `value` is copied at once, `source` when it lands.
void copy_later(void* to, const void* source, uint32_t bytes, uint64_t* barrier);
void store_later(void* to, const void* value, uint32_t bytes, uint64_t* barrier);
void land_later(std::function<void()> land, uint32_t bytes, uint64_t* barrier);
int cluster_rank();                  // of the calling thread's CTA
void* fiber_local(void* (*make)());  // one object a thread, made when it is first asked for

template <class T>
inline uint64_t bits(T value) {
  static_assert(sizeof value <= 8);
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  return word;
}
template <class T>
inline T from_bits(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}
inline int lane() { return static_cast<int>(threadIdx.x & 31); }

}  // namespace emulation

template <class T>
inline T __shfl_sync(unsigned, T value, int from) {
  return emulation::from_bits<T>(emulation::warp_gather(emulation::bits(value))[from & 31]);
}
template <class T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulation::from_bits<T>(emulation::warp_gather(emulation::bits(value))[emulation::lane() ^ mask]);
}
template <class T>
inline T __shfl_up_sync(unsigned, T value, int delta) {
  const uint64_t* all = emulation::warp_gather(emulation::bits(value));
  return emulation::from_bits<T>(all[emulation::lane() >= delta ? emulation::lane() - delta : emulation::lane()]);
}
template <class T>
inline T __shfl_down_sync(unsigned, T value, int delta) {
  const uint64_t* all = emulation::warp_gather(emulation::bits(value));
  return emulation::from_bits<T>(all[emulation::lane() + delta < 32 ? emulation::lane() + delta : emulation::lane()]);
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
  const uint64_t* all = emulation::warp_gather(predicate);
  unsigned found = 0;
  for (int i = 0; i < 32; ++i) found |= static_cast<unsigned>(all[i] & 1) << i;
  return found;
}
inline bool __any_sync(unsigned mask, bool predicate) { return __ballot_sync(mask, predicate) != 0; }
inline bool __all_sync(unsigned mask, bool predicate) { return __ballot_sync(mask, predicate) == ~0u; }
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const uint64_t* all = emulation::warp_gather(value);
  return static_cast<unsigned>(*std::max_element(all, all + 32));
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  const uint64_t* all = emulation::warp_gather(value);
  unsigned sum = 0;
  for (int i = 0; i < 32; ++i) sum += static_cast<unsigned>(all[i]);
  return sum;
}
inline void __syncwarp() { emulation::warp_gather(0); }
inline void __syncthreads() { emulation::cta_barrier(0, static_cast<int>(blockDim.x)); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline uint32_t __float_as_uint(float value) { return emulation::from_bits<uint32_t>(emulation::bits(value)); }
inline float __uint_as_float(uint32_t value) { return emulation::from_bits<float>(value); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) {
  volatile float product = a * b;
  return product;
}
inline float __fadd_rn(float a, float b) {
  volatile float sum = a + b;
  return sum;
}
inline float __fsub_rn(float a, float b) {
  volatile float difference = a - b;
  return difference;
}
inline float __frcp_rn(float value) { return 1.0f / value; }
inline float __fdividef(float a, float b) { return a / b; }
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t picked = 0;
  for (int i = 0; i < 4; ++i) picked |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return picked;
}
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
template <class T>
inline T __ldcg(const T* from) {
  return *from;
}
template <class T>
inline T __ldg(const T* from) {
  return *from;
}
// Fibers change over at calls into the emulation only, so these are atomic.
template <class T>
inline T atomicMax(T* to, T value) {
  const T before = *to;
  *to = std::max(before, value);
  return before;
}
template <class T>
inline T atomicAdd(T* to, T value) {
  const T before = *to;
  *to += value;
  return before;
}
