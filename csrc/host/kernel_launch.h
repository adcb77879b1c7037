// How every kernel of a step is launched.

#pragma once

#include <cuda_runtime.h>

namespace fut {

// Gives a kernel's blocks the split of an SM's memory that leaves most of it shared: an SM must be empty before the
// split changes, so kernels that want different ones never overlap.
template <class Kernel>
cudaError_t share_multiprocessor(Kernel kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}

// Shared memory of a block where blocks of two consecutive kernels fit on an SM, so that the later one fetches while
// the earlier one works. The card puts a block wherever there is room, and two of one kernel on an SM would leave
// another SM without: the kernel would take half as long again. So neighbours in a step alternate, as far as an odd
// number of kernels a layer allows: two wide blocks never fit, and a narrow kernel starts where a wide block stands or
// leaves room for one. An SM has 228 KB, of which each block takes one for itself.
inline constexpr int kNarrowShared = 112 * 1024;
inline constexpr int kWideShared = 114 * 1024;

struct LaunchShape {
  dim3 grid;
  int threads;
  int shared_bytes = 0;
  int cluster = 1;         // blocks, along x
  bool dependent = false;  // may start while the kernel before still runs
};

// Calls `use` with the configuration of a launch.
template <class Use>
cudaError_t with_launch_config(const LaunchShape& shape, cudaStream_t stream, Use use) {
  cudaLaunchAttribute attributes[2] = {};
  int count = 0;
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  if (shape.dependent) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = static_cast<unsigned>(count);
  return use(config);
}

template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream,
                          const Arguments&... arguments) {
  return with_launch_config(shape, stream, [&](const cudaLaunchConfig_t& config) {
    return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  });
}

}  // namespace fut
