// Host side of a projection: checks, the choice of tiles, and the launch.

#pragma once

#include <cuda_runtime.h>

#include "projection_params.cuh"

namespace fut {

// What a launch multiplies besides its matrix.
struct ProjectionInput {
  const void* x;             // BF16 [*, cols]
  const float* square_sums;  // [*, square_parts] or null: no RMSNorm
  const int32_t* gather;     // rows of x, or null
  float eps;
  int32_t square_parts;
  int32_t tokens;  // any number
};

struct ProjectionOutput {
  void* y;
  float* square_sums;  // FUT_RESIDUAL: [tokens, stored_rows / 16]
  int32_t epilogue;
};

// What the card offers a launch, asked for once.
struct CardLimits {
  int sm_count;
  int shared_bytes;  // most dynamic shared memory of a block
};

cudaError_t card_limits(CardLimits* limits);

// The reason why a matrix cannot be multiplied, or null.
const char* projection_problem(const fut_matrix& matrix);

// Launches a product; `dependent`: with programmatic dependent launch.
cudaError_t launch_projection(const fut_matrix& matrix, const ProjectionInput& input, const ProjectionOutput& output,
                              const CardLimits& card, bool dependent, cudaStream_t stream);

// Partial sums of squares of BF16 rows [rows, cols], one for every 16 columns: [rows, ceil(cols / 16)].
cudaError_t launch_square_sums(const void* x, float* sums, int rows, int cols, bool dependent, cudaStream_t stream);

}  // namespace fut
