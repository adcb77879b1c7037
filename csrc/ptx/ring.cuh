// What a ring of shared memory needs beside bulk_copy.cuh (PTX ISA, mbarrier, cp.async.bulk and proxy fences).

#pragma once

#include "bulk_copy.cuh"

namespace fut {

// Orders the copy engine's later reads of global memory after what this thread has seen written.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// bulk_copy for data that other CTAs read too.
__device__ __forceinline__ void bulk_copy_shared_data(void* shared, const void* global, uint32_t bytes,
                                                      uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

}  // namespace fut
