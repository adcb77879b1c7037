// Tensor maps of row-major matrices, for the copy engine.

#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "../fut.h"

namespace fut {

// A matrix in device memory: rows of `columns` elements, `stride_bytes` apart.
struct MatrixView {
  const char* name;  // for messages
  const void* data;
  int64_t rows, columns, stride_bytes;
};

// FUT_INVALID, with what is wrong, where the copy engine cannot read or write a matrix: it wants addresses and strides
// that are multiples of 16.
fut_status check_view(const MatrixView& view, int element_bytes);

// Describes boxes of `box_rows` rows by `row_bytes` (128, 64 or 32), swizzled as wgmma wants them; what lies outside of
// the matrix is read as zero. `element_bytes` 1: E4M3, 2: BF16 or FP16.
fut_status describe_operand(const MatrixView& view, int element_bytes, int box_rows, int row_bytes, CUtensorMap* map);

}  // namespace fut
