#include <cstdarg>
#include <cstdio>

#include "error.h"

namespace fut {

namespace {
thread_local char last_error[1024] = "";
}

fut_status fail(fut_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return status;
}

fut_status check_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return FUT_OK;
  cudaGetLastError();  // a launch that failed must not fail the next call as well
  return fail(FUT_CUDA, "%s: %s (%s)", call, cudaGetErrorString(error), cudaGetErrorName(error));
}

}  // namespace fut

extern "C" {

const char* fut_last_error(void) { return fut::last_error; }

int32_t fut_abi_version(void) { return FUT_ABI_VERSION; }

}  // extern "C"
