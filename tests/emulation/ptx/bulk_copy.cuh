#pragma once
#include "emulation.h"

namespace fut {

// A shared address is the place itself; addresses in other CTAs are found with their rank.
using emulated_address = uint64_t;

inline void barrier_init(uint64_t* barrier, uint32_t arrivals) { emulation::barrier_init(barrier, arrivals); }
inline void fence_barrier_init() {}
inline void fence_async_proxy() {}
inline void fence_async_proxy_global() {}
inline void barrier_expect(uint64_t* barrier, uint32_t bytes) { emulation::barrier_expect(barrier, bytes); }
inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  while (!emulation::barrier_passed(barrier, parity)) emulation::yield();
}
inline void barrier_arrive(uint64_t* barrier) { emulation::barrier_arrive(barrier); }
inline emulated_address cluster_address(const void* pointer, int rank) {
  return emulation::cluster_place(pointer, rank);
}
inline void cluster_store(emulated_address to, const float (&value)[4], emulated_address barrier) {
  emulation::store_later(reinterpret_cast<void*>(to), value, 16, reinterpret_cast<uint64_t*>(barrier));
}
inline void cluster_arrive(emulated_address barrier) {
  emulation::barrier_arrive(reinterpret_cast<uint64_t*>(barrier));
}
inline void cluster_sync_relaxed() { emulation::cluster_barrier(); }
inline void cp_async_16(void* to, const void* from) { std::memcpy(to, from, 16); }
inline void cp_async_wait() {}
inline uint64_t evict_first_policy() { return 0; }
inline void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* barrier, uint64_t) {
  emulation::copy_later(to, from, bytes, barrier);
}

}  // namespace fut
