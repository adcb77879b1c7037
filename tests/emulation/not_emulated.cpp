// What the emulated library must have to be loaded, and does not compute: choosing tokens has a twin of its own
// (tests/device_sampling_twin.py), and a bandwidth means nothing here.

#include "decode/sampling.cuh"
#include "host/error.h"

namespace fut {

cudaError_t launch_sampling(const float*, const fut_sampling*, int32_t*, int, int, void*, cudaStream_t, bool) {
  return cudaErrorInvalidValue;
}

}  // namespace fut

extern "C" fut_status fut_read_bandwidth(const void*, int64_t, uint32_t*, void*) {
  return fut::fail(FUT_INVALID, "fut_read_bandwidth is not emulated");
}
