// Choosing the next token of every row on the device; csrc/decode/sampling.cu.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../fut.h"

namespace fut {

// Largest vocabulary: 2^18 weights of at most 2^45 each sum to less than 2^64.
inline constexpr int kMaxSampledVocab = 1 << 18;
inline constexpr int kMaxSampledRows = 65535;  // the grid's second dimension

// logits F32 [rows, vocab], sampling device [rows] -> tokens device [rows]; -1 where a logit of the row is NaN or +inf
// or all are -inf. One launch whose grid depends on rows and vocab only, so that it can be captured. `workspace` is not
// used: all state is in the shared memory of a cluster. With `programmatic_launch` the kernel may start while the one
// that writes the logits still runs.
cudaError_t launch_sampling(const float* logits, const fut_sampling* sampling, int32_t* tokens, int rows, int vocab,
                            void* workspace, cudaStream_t stream, bool programmatic_launch);

}  // namespace fut
