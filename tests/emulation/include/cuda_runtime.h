// As much of the runtime as the host code calls. Streams run at once; a graph is the list of its launches.

#pragma once

#include <vector>

#include "cuda.h"
#include "emulation.h"

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
enum { cudaLaunchAttributeProgrammaticStreamSerialization, cudaLaunchAttributeClusterDimension };
enum { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributePreferredSharedMemoryCarveout };
enum { cudaSharedmemCarveoutMaxShared, cudaStreamCaptureModeRelaxed, cudaStreamNonBlocking, cudaEventDisableTiming };
enum { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };

using cudaEvent_t = void*;
struct EmulatedGraph {
  std::vector<std::function<void()>> launches;
};
using cudaGraph_t = EmulatedGraph*;
using cudaGraphExec_t = EmulatedGraph*;
struct EmulatedStream {
  EmulatedGraph* recording = nullptr;
};
using cudaStream_t = EmulatedStream*;

struct cudaLaunchAttribute {
  int id;
  struct {
    int programmaticStreamSerializationAllowed;
    dim3 clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  int numAttrs;
};

inline cudaError_t emulated_launch(cudaStream_t stream, std::function<void()> work) {
  if (stream != nullptr && stream->recording != nullptr)
    stream->recording->launches.push_back(std::move(work));
  else
    work();
  return cudaSuccess;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  int cluster = 1;
  for (int i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
      cluster = static_cast<int>(config->attrs[i].val.clusterDim.x);
  const dim3 grid = config->gridDim;
  const int threads = static_cast<int>(config->blockDim.x);
  return emulated_launch(config->stream,
                         [=] { emulation::launch(grid, threads, cluster, [=] { kernel(arguments...); }); });
}

// kernel<<<grid, threads, shared, stream>>>(arguments...)
template <class... Parameters, class... Arguments>
void emulated_call(void (*kernel)(Parameters...), dim3 grid, int threads, size_t, cudaStream_t stream,
                   Arguments... arguments) {
  emulated_launch(stream, [=] { emulation::launch(grid, threads, 1, [=] { kernel(arguments...); }); });
}

int emulated_multiprocessors();

inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? emulated_multiprocessors() : 232448;
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int) {
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* count, Kernel, const cudaLaunchConfig_t* config) {
  *count = emulated_multiprocessors() / static_cast<int>(config->attrs[0].val.clusterDim.x);
  return cudaSuccess;
}
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };
// The one function of the driver that is asked for.
inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** found, unsigned, int,
                                                    cudaDriverEntryPointQueryResult* result) {
  *result = cudaDriverEntryPointSuccess;
  return *found = reinterpret_cast<void*>(&cuTensorMapEncodeTiled), cudaSuccess;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "emulated error"; }
inline const char* cudaGetErrorName(cudaError_t) { return "emulated error"; }

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, int) {
  return *stream = new EmulatedStream, cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete stream, cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int) {
  return stream->recording = new EmulatedGraph, cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = stream->recording;
  stream->recording = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, int) {
  return *made = new EmulatedGraph(*graph), cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return delete graph, cudaSuccess; }
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  for (const auto& work : graph->launches) work();
  return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, int) { return *event = nullptr, cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaMallocHost(void** memory, size_t bytes) { return *memory = std::malloc(bytes), cudaSuccess; }
inline cudaError_t cudaFreeHost(void* memory) { return std::free(memory), cudaSuccess; }
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
