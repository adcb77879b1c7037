// fut_project: one product for tests and benchmarks.

#include "../decode/projection.h"
#include "error.h"

namespace {

// Partial sums of squares of a row of the input, and of the output in whole row tiles.
int64_t input_parts(const fut_matrix& matrix) { return (matrix.cols + 15) / 16; }
int64_t output_parts(const fut_matrix& matrix) { return matrix.stored_rows / fut::kTileRows; }

}  // namespace

extern "C" int64_t fut_project_workspace_bytes(const fut_matrix* matrix, int32_t rows) {
  return rows * (input_parts(*matrix) + output_parts(*matrix)) * static_cast<int64_t>(sizeof(float));
}

extern "C" fut_status fut_project(const fut_matrix* matrix, const void* x, void* y, int32_t rows, int32_t epilogue,
                                  float eps, void* workspace, int64_t workspace_bytes, void* stream_handle) {
  using namespace fut;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  if (const char* problem = projection_problem(*matrix))
    return fail(FUT_INVALID, "fut_project: the matrix: %s", problem);
  if (rows < 1) return fail(FUT_INVALID, "fut_project: rows is %d, expected at least 1", rows);
  const int64_t norm_parts = input_parts(*matrix);
  const int64_t needed = fut_project_workspace_bytes(matrix, rows);
  if (needed > workspace_bytes)
    return fail(FUT_INVALID, "fut_project: the workspace has %lld bytes, needs %lld",
                static_cast<long long>(workspace_bytes), static_cast<long long>(needed));
  CardLimits card;
  FUT_CHECK(card_limits(&card));
  float* const norm_sums = static_cast<float*>(workspace);
  float* const y_sums = norm_sums + rows * norm_parts;
  if (eps >= 0) FUT_CHECK(launch_square_sums(x, norm_sums, rows, matrix->cols, true, stream));
  ProjectionInput input = {};
  input.x = x;
  input.square_sums = eps >= 0 ? norm_sums : nullptr;
  input.square_parts = static_cast<int32_t>(norm_parts);
  input.eps = eps;
  input.tokens = rows;
  FUT_CHECK(launch_projection(*matrix, input, {y, y_sums, epilogue}, card, true, stream));
  return FUT_OK;
}
