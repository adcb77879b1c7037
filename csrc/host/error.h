// What went wrong, as text for the caller's thread.

#pragma once

#include <cuda_runtime.h>

#include "../fut.h"

namespace fut {

// Sets the thread's error text, printf-style, and returns `status`.
fut_status fail(fut_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));

// FUT_OK, or FUT_CUDA with the text "call: CUDA's words".
fut_status check_cuda(cudaError_t error, const char* call);

}  // namespace fut

// Leaves the function with the status of a CUDA call that failed.
#define FUT_CHECK(call)                                            \
  do {                                                             \
    const fut_status fut_status_ = fut::check_cuda((call), #call); \
    if (fut_status_ != FUT_OK) return fut_status_;                 \
  } while (0)
