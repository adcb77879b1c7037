// The small kernels of a run over prompts: rows of the embedding, norms where they stand apart, and the state of
// activation scales.

#pragma once

#include <cuda_runtime.h>

#include "../fut.h"
#include "gemm_params.h"

namespace fut {

struct EmbedPromptsParams {
  const uint8_t* embed;  // BF16 [vocab, hidden]
  const int32_t* token;  // [rows]
  uint8_t* h;            // BF16 [rows, hidden]
  float* square_sums;    // [rows, ceil(hidden / kSquareColumns)]
  QuantizedOut quantized;
  const float* scale;          // [requests] of the E4M3 copy
  const int32_t* row_request;  // [rows]
  int32_t rows, hidden;        // hidden a multiple of 8
};

// h = the rows' embeddings, their sums of squares, and their E4M3 copy where `quantized.data` is not null.
cudaError_t launch_embed_prompts(const EmbedPromptsParams& params, bool dependent, cudaStream_t stream);

struct NormalizeParams {
  const uint8_t* h;          // BF16 [rows, hidden]
  const float* square_sums;  // [rows, square_parts]
  const float* gain;         // [hidden] or null
  uint8_t* out;              // BF16 [rows, hidden]
  int32_t rows, hidden, square_parts;
  float eps;
};

// out = h / rms(h) * gain, rounded once.
cudaError_t launch_normalize(const NormalizeParams& params, bool dependent, cudaStream_t stream);

// What is known of every E4M3 site of a model (layers times four), and the part of it that a run works on.
struct ActivationState {
  float* scale;                 // [sites, states]
  uint32_t* amax;               // [sites, states]: of the calls' runs so far
  unsigned long long* ignored;  // maxima that were zero or not finite
  float* run_scale;             // [sites, requests] of the run
  uint32_t* run_amax;           // [sites, requests]
  const int32_t* state;         // [requests]: the state of each request
  const int32_t* ended;         // [ended_count]: states whose call is over with this run
  int32_t sites, states, requests, ended_count;
  float margin;
  bool frozen;
};

// Before a run: its scales, and maxima of nothing.
cudaError_t launch_begin_scales(const ActivationState& state, bool dependent, cudaStream_t stream);
// After it: maxima join those of the call's earlier runs; calls that are over leave the scales of the next.
cudaError_t launch_end_scales(const ActivationState& state, bool dependent, cudaStream_t stream);

}  // namespace fut
