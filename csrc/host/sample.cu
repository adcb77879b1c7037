// fut_sample: tokens from logits, for tests and benchmarks.

#include "../decode/sampling.cuh"
#include "error.h"

extern "C" int64_t fut_sample_workspace_bytes(int32_t /*max_rows*/, int32_t /*vocab*/) { return 0; }

extern "C" fut_status fut_sample(const float* logits, const fut_sampling* sampling, int32_t* tokens, int32_t rows,
                                 int32_t vocab, void* workspace, int64_t /*workspace_bytes*/, void* stream) {
  using namespace fut;
  if (logits == nullptr || sampling == nullptr || tokens == nullptr)
    return fail(FUT_INVALID, "fut_sample: logits, sampling and tokens must not be null");
  if (rows < 1 || rows > kMaxSampledRows || vocab < 1 || vocab > kMaxSampledVocab)
    return fail(FUT_INVALID, "fut_sample: %d rows of %d logits, expected 1 to %d rows of 1 to %d", rows, vocab,
                kMaxSampledRows, kMaxSampledVocab);
  FUT_CHECK(
      launch_sampling(logits, sampling, tokens, rows, vocab, workspace, static_cast<cudaStream_t>(stream), false));
  return FUT_OK;
}
