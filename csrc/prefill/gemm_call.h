// Host side of the GEMM: what a call is made of, and one launcher for each epilogue.

#pragma once

#include <cuda_runtime.h>

#include "../fut.h"
#include "gemm_params.h"
#include "tensor_map.h"

namespace fut {

struct GemmCall {
  MatrixView a, b;
  int32_t m, n, k;
  int32_t format;  // FUT_E4M3 or FUT_BF16
  bool promoted;   // E4M3 sums promoted to FP32
  GemmScales scales;
  GemmPlan plan;  // tile_n 0: to be chosen
  bool dependent;
  cudaStream_t stream;
};

// What the card offers, asked for once in the process.
cudaError_t multiprocessor_count(int* count);

fut_status launch_store_bf16(const GemmCall& call, void* out, int64_t stride_bytes);
fut_status launch_store_f32(const GemmCall& call, void* out, int64_t stride_bytes);
fut_status launch_residual(const GemmCall& call, const ResidualParams& params);
fut_status launch_swiglu(const GemmCall& call, const QuantizedOut& out);
fut_status launch_swiglu_bf16(const GemmCall& call, void* out, int64_t stride_bytes);
fut_status launch_qkv(const GemmCall& call, const QkvParams& params, int head_dim);

// fut_gemm; `dependent`: with programmatic dependent launch.
fut_status run_gemm(const fut_gemm_call& call, bool dependent, cudaStream_t stream);

}  // namespace fut
