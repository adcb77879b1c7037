// What every kernel of a step has in common.

#pragma once

#include <cuda_runtime.h>

namespace fut {

// Gives a kernel's blocks the split of an SM's memory that leaves most of it shared. An SM must be empty before the
// split changes, so kernels that want different ones never overlap: one alone in a step costs each of its boundaries
// microseconds.
template <class Kernel>
cudaError_t share_multiprocessor(Kernel kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}

}  // namespace fut
