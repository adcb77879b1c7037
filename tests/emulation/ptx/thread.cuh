#pragma once
#include "emulation.h"

namespace fut {

template <int kThreads>
inline void named_barrier(int id) {
  emulation::cta_barrier(id, kThreads);
}
template <int kThreads>
inline void named_barrier_arrive(int id) {
  emulation::cta_barrier_arrive(id, kThreads);
}
inline uint32_t thread_read_anew() { return threadIdx.x; }
inline uint32_t arrive(uint32_t* counter, uint32_t count) { return atomicAdd(counter, count); }
inline void touch(const void*) {}
inline float exp2_fast(float x) { return std::exp2(x); }

}  // namespace fut
