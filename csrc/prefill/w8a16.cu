// fut_w8a16: checks, plan and launch.

#include <atomic>

#include "../host/error.h"
#include "../host/kernel_launch.h"
#include "gemm_call.h"
#include "w8a16.cuh"

namespace fut {

namespace {

template <class Activation, int kTokens, class Out>
fut_status launch(const CUtensorMap& weights, const CUtensorMap& activations, const W8a16Params& p, int sm_count,
                  cudaStream_t stream) {
  const auto kernel = w8a16<Activation, kTokens, Out>;
  constexpr int kSharedBytes = sizeof(W8a16Shared<kTokens>);
  static std::atomic<bool> prepared{false};
  if (!prepared) {
    FUT_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    prepared = true;
  }
  const int64_t units = static_cast<int64_t>(p.channel_tiles) * p.token_tiles * p.splits;
  const LaunchShape shape = {dim3(static_cast<unsigned>(units < sm_count ? units : sm_count)), kW8a16Threads,
                             kSharedBytes};
  FUT_CHECK(launch_kernel(kernel, shape, stream, weights, activations, p));
  return FUT_OK;
}

template <class Activation, class Out>
fut_status launch_tokens(int tokens, const CUtensorMap& weights, const CUtensorMap& activations, const W8a16Params& p,
                         int sm_count, cudaStream_t stream) {
  switch (tokens) {
    case 16:
      return launch<Activation, 16, Out>(weights, activations, p, sm_count, stream);
    case 32:
      return launch<Activation, 32, Out>(weights, activations, p, sm_count, stream);
    case 64:
      return launch<Activation, 64, Out>(weights, activations, p, sm_count, stream);
    case 128:
      return launch<Activation, 128, Out>(weights, activations, p, sm_count, stream);
    default:
      return launch<Activation, 256, Out>(weights, activations, p, sm_count, stream);
  }
}

fut_status check_call(const fut_w8a16_call& c) {
  if (c.m < 1 || c.n < 1 || c.k < 1)
    return fail(FUT_INVALID, "fut_w8a16: m, n and k are %d, %d and %d, expected at least 1", c.m, c.n, c.k);
  if (c.alpha == nullptr) return fail(FUT_INVALID, "fut_w8a16: alpha is null");
  const bool power_of_two = c.tokens != 0 && (c.tokens & (c.tokens - 1)) == 0;
  if (c.tokens != 0 && (!power_of_two || c.tokens < 16 || c.tokens > 256))
    return fail(FUT_INVALID, "fut_w8a16: no tile of %d tokens; 16, 32, 64, 128 and 256 exist", c.tokens);
  const int32_t stages = static_cast<int32_t>(ceil_divide(c.k, kW8a16Stage));
  if (c.tokens != 0 && (c.splits < 1 || c.splits > kW8a16MostSplits ||
                        (c.splits > 1 && stages_a_split(stages, c.splits) * (c.splits - 1) >= stages)))
    return fail(FUT_INVALID, "fut_w8a16: k of %d cannot be split %d times", c.k, c.splits);
  return FUT_OK;
}

W8a16Plan plan_of(const fut_w8a16_call& c, int sm_count) {
  return c.tokens != 0 ? W8a16Plan{c.tokens, c.splits, 0.f} : plan_w8a16(c.m, c.n, c.k, sm_count);
}

}  // namespace
}  // namespace fut

extern "C" fut_status fut_w8a16_plan(int32_t m, int32_t n, int32_t k, int32_t multiprocessors, int32_t* tokens,
                                     int32_t* splits, int64_t* workspace_bytes) {
  using namespace fut;
  if (m < 1 || n < 1 || k < 1 || multiprocessors < 1)
    return fail(FUT_INVALID, "fut_w8a16_plan: a size is not positive");
  const W8a16Plan plan = *tokens != 0 ? W8a16Plan{*tokens, *splits, 0.f} : plan_w8a16(m, n, k, multiprocessors);
  *tokens = plan.tokens;
  *splits = plan.splits;
  *workspace_bytes = w8a16_workspace_bytes(m, n, plan);
  return FUT_OK;
}

extern "C" fut_status fut_w8a16(const fut_w8a16_call* c, void* stream_handle) {
  using namespace fut;
  fut_status status = check_call(*c);
  if (status != FUT_OK) return status;
  int sm_count = 0;
  FUT_CHECK(multiprocessor_count(&sm_count));
  const W8a16Plan plan = plan_of(*c, sm_count);
  const int64_t needed = w8a16_workspace_bytes(c->m, c->n, plan);
  if (needed > c->workspace_bytes)
    return fail(FUT_INVALID, "fut_w8a16: the workspace has %lld bytes, needs %lld",
                static_cast<long long>(c->workspace_bytes), static_cast<long long>(needed));
  if (needed > 0 && reinterpret_cast<uintptr_t>(c->workspace) % 16 != 0)
    return fail(FUT_INVALID, "fut_w8a16: the workspace must be 16-byte aligned");
  const int out_bytes = c->out_is_f32 ? 4 : 2;
  CUtensorMap weights, activations;
  status = describe_operand({"fut_w8a16: the weights", c->b, c->n, c->k, c->b_stride}, 1, kW8a16Channels, kW8a16Stage,
                            &weights);
  if (status == FUT_OK)
    status = describe_operand({"fut_w8a16: the activations", c->a, c->m, c->k, 2 * c->a_stride}, 2, plan.tokens,
                              2 * kW8a16Stage, &activations);
  if (status == FUT_OK)
    status = check_view({"fut_w8a16: the output", c->out, c->m, c->n, out_bytes * c->out_stride}, out_bytes);
  if (status != FUT_OK) return status;
  W8a16Params p = {};
  p.alpha = c->alpha;
  p.bias = c->bias;
  p.out = static_cast<uint8_t*>(c->out);
  p.out_stride_bytes = out_bytes * c->out_stride;
  p.m = c->m;
  p.n = c->n;
  p.stages = static_cast<int32_t>(ceil_divide(c->k, kW8a16Stage));
  p.splits = plan.splits;
  p.stages_a_split = stages_a_split(p.stages, p.splits);
  p.channel_tiles = static_cast<int32_t>(ceil_divide(c->n, kW8a16Channels));
  p.token_tiles = static_cast<int32_t>(ceil_divide(c->m, plan.tokens));
  p.alpha_is_vector = c->alpha_is_vector;
  p.partial = static_cast<float*>(c->workspace);
  const int64_t tiles = w8a16_tiles(c->m, c->n, plan.tokens);
  p.counters = reinterpret_cast<uint32_t*>(p.partial + tiles * plan.splits * kW8a16Channels * plan.tokens);
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  if (c->is_fp16)
    return c->out_is_f32 ? launch_tokens<Fp16, OutF32>(plan.tokens, weights, activations, p, sm_count, stream)
                         : launch_tokens<Fp16, Fp16>(plan.tokens, weights, activations, p, sm_count, stream);
  return c->out_is_f32 ? launch_tokens<Bf16, OutF32>(plan.tokens, weights, activations, p, sm_count, stream)
                       : launch_tokens<Bf16, Bf16>(plan.tokens, weights, activations, p, sm_count, stream);
}
