// Copies of boxes of a matrix between global and shared memory (PTX ISA, cp.async.bulk.tensor), and what else a kernel
// of warps with different tasks needs: more or fewer registers a warpgroup, ranks and barriers of a cluster.

#pragma once

#include <cuda.h>

#include <cstdint>

#include "bulk_copy.cuh"

namespace fut {

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies the box whose first element is (column, row) and completes its bytes, those outside of the matrix included
// (they are zero), on `barrier`.
__device__ __forceinline__ void tensor_copy(void* shared, const CUtensorMap* map, int column, int row,
                                            uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(shared_address(shared)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

// The same into the same place of every CTA of the cluster whose bit is in `ctas`; each is told at its own barrier.
__device__ __forceinline__ void tensor_copy_multicast(void* shared, const CUtensorMap* map, int column, int row,
                                                      uint64_t* barrier, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(ctas)
      : "memory");
}

// The calling warpgroup gives registers back, or waits until there are more. Ptxas ignores it (warning C7508) where the
// kernel has no __launch_bounds__.
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

}  // namespace fut
