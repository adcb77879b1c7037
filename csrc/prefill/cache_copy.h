// The decode cache's copy of K and V that a chunk of prompts has just put into the history.

#pragma once

#include <cuda_runtime.h>

#include "../fut.h"

namespace fut {

// Checks nothing; see fut_cache_copy. `dependent`: with programmatic dependent launch.
cudaError_t launch_cache_copy(const fut_cache_copy_call& call, bool dependent, cudaStream_t stream);

}  // namespace fut
