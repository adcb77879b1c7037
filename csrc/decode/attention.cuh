// Attention of a decode step over the paged cache, including q/k norm, RoPE, rotation, quantisation and the append.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../fut.h"

namespace fut {

struct AttentionCall {
  fut_attention_shape shape;
  fut_kv_cache cache;
  int32_t layer;
  fut_rows rows;        // `token` is not read; a row with a negative position is left out, its output unwritten
  const float* qkv;     // device F32 [rows, (heads + 2 kv_heads) * head_dim]
  const float* q_norm;  // device F32 [head_dim], or null
  const float* k_norm;
  void* out;        // device BF16 [rows, heads * head_dim]
  void* workspace;  // attention_workspace_bytes(), 256-byte aligned, zero before its first use
  // Rows may be consecutive tokens of one request: a kernel before attention writes their K and V.
  bool chunked;
  // Launch as a programmatic dependent of the kernel before. It may then start early, and the kernel after it may too.
  bool dependent;
  // Positions, slots, page table and the cache of earlier tokens were written before the kernel before this one could
  // start: the cache is read ahead of waiting for it. Only with `dependent`, and not used where `chunked`.
  bool cache_ready;
};

int64_t attention_workspace_bytes(const fut_attention_shape& shape, int max_rows);

// Checks nothing; see check_attention. One kernel, or two where chunked. The grid depends on the number of rows, the
// shapes and max_context only, so that a captured graph holds for all positions.
cudaError_t launch_attention(const AttentionCall& call, cudaStream_t stream);

// Sizes, alignments and pointers that launch_attention takes for granted. FUT_OK, or a failure with its text.
fut_status check_attention(const AttentionCall& call, int64_t workspace_bytes);

}  // namespace fut
