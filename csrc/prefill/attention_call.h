// Host side of prefill's attention: what a call is made of, checked.

#pragma once

#include <cuda_runtime.h>

#include "../fut.h"
#include "gemm_call.h"

namespace fut {

struct PrefillAttentionCall {
  MatrixView k, v;  // tokens of all pages and KV heads by head_dim
  const uint8_t* q;
  fut_prompts prompts;
  int32_t kv_heads, group;  // query heads of a KV head
  int32_t head_dim;         // 64, 80, 96 or 128
  uint8_t* out;             // BF16 or null
  int64_t out_stride_bytes;
  const float* out_scale;  // of the E4M3 output
  QuantizedOut quantized;  // data null: none
  uint32_t* counters;      // two
  bool dependent;
  cudaStream_t stream;
};

inline constexpr int64_t kPrefillAttentionWorkspace = 256;

fut_status launch_prefill_attention(const PrefillAttentionCall& call);

}  // namespace fut
