// Threads: their index, barriers of some of a CTA's warps, counters, and a fast power of two (PTX ISA).

#pragma once

#include <cstdint>

namespace fut {

// Waits for kThreads threads of the CTA, whole warps, at one of its 16 barriers.
template <int kThreads>
__device__ __forceinline__ void named_barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// Arrives at such a barrier and waits for nothing; kThreads counts these threads and those that wait.
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// threadIdx.x, read anew: what follows from it need not be kept in registers until it is used.
__device__ __forceinline__ uint32_t thread_read_anew() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Adds `count` and returns the sum before. Who finds that others have arrived sees what their warps wrote before.
__device__ __forceinline__ uint32_t arrive(uint32_t* counter, uint32_t count) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(count) : "memory");
  return before;
}

// Reads a line of constants into the L1 and waits for nothing.
__device__ __forceinline__ void touch(const void* constants) {
  uint32_t unused;
  asm volatile("ld.global.nc.L1::evict_last.b32 %0, [%1];" : "=r"(unused) : "l"(constants));
}

__device__ __forceinline__ float exp2_fast(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

}  // namespace fut
