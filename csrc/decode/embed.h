// The first operation of a step: rows of the embedding become the residual stream.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fut {

// h BF16 [rows, hidden] = embed BF16 [vocab, hidden] at the rows' tokens, and the partial sums of squares of h, one for
// every 16 columns: [rows, ceil(hidden / 16)].
cudaError_t launch_embed(const void* embed, const int32_t* token, void* h, float* square_sums, int rows, int hidden,
                         cudaStream_t stream);

}  // namespace fut
