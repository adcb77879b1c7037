// fut_w8a16: checks, plan and launch.

#include <atomic>

#include "../host/error.h"
#include "../host/kernel_launch.h"
#include "gemm_call.h"
#include "w8a16.cuh"

namespace fut {

namespace {

// What a launch needs whatever the kernel.
struct Operands {
  CUtensorMap weights, activations;
  W8a16Params params;
  int sm_count;
  cudaStream_t stream;
};

template <class Activation, int kTokens, int kChannels, class Out>
fut_status launch(const Operands& o) {
  const W8a16Params& p = o.params;
  const auto kernel = w8a16<Activation, kTokens, kChannels, Out>;
  constexpr int kSharedBytes = sizeof(W8a16Shared<kTokens, kChannels>);
  static std::atomic<bool> prepared{false};
  if (!prepared) {
    FUT_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    prepared = true;
  }
  const int64_t units = static_cast<int64_t>(p.channel_tiles) * p.token_tiles * p.splits;
  const LaunchShape shape = {dim3(static_cast<unsigned>(units < o.sm_count ? units : o.sm_count)), kW8a16Threads,
                             kSharedBytes};
  FUT_CHECK(launch_kernel(kernel, shape, o.stream, o.weights, o.activations, p));
  return FUT_OK;
}

template <class Activation, class Out>
fut_status launch_tile(const W8a16Plan& plan, const Operands& o) {
  constexpr int kShared = kW8a16Cooperative, kInTurns = kW8a16PingPong;
  const bool in_turns = plan.channels == kInTurns;
  switch (plan.tokens) {
    case 16:
      return in_turns ? launch<Activation, 16, kInTurns, Out>(o) : launch<Activation, 16, kShared, Out>(o);
    case 32:
      return in_turns ? launch<Activation, 32, kInTurns, Out>(o) : launch<Activation, 32, kShared, Out>(o);
    case 64:
      return in_turns ? launch<Activation, 64, kInTurns, Out>(o) : launch<Activation, 64, kShared, Out>(o);
    case 128:
      return launch<Activation, 128, kShared, Out>(o);
    default:
      return launch<Activation, 256, kShared, Out>(o);
  }
}

fut_status check_tile(const fut_w8a16_tile& t, int32_t k) {
  if (t.tokens == 0) return FUT_OK;
  const bool in_turns = t.channels == kW8a16PingPong;
  const int most = in_turns ? kW8a16MostPingPongTokens : 256;
  const bool is_tile = (in_turns || t.channels == kW8a16Cooperative) && (t.tokens & (t.tokens - 1)) == 0;
  if (!is_tile || t.tokens < 16 || t.tokens > most)
    return fail(FUT_INVALID,
                "fut_w8a16: no tile of %d channels and %d tokens; 16, 32, 64, 128 and 256 tokens exist of "
                "128 channels, those up to 64 of 64",
                t.channels, t.tokens);
  const auto stages = static_cast<int32_t>(ceil_divide(k, kW8a16Stage));
  if (t.splits < 1 || t.splits > kW8a16MostSplits ||
      (t.splits > 1 && stages_a_split(stages, t.splits) * (t.splits - 1) >= stages))
    return fail(FUT_INVALID, "fut_w8a16: k of %d cannot be split %d times", k, t.splits);
  return FUT_OK;
}

fut_status check_call(const fut_w8a16_call& c) {
  if (c.m < 1 || c.n < 1 || c.k < 1)
    return fail(FUT_INVALID, "fut_w8a16: m, n and k are %d, %d and %d, expected at least 1", c.m, c.n, c.k);
  if (c.alpha == nullptr) return fail(FUT_INVALID, "fut_w8a16: alpha is null");
  return check_tile(c.tile, c.k);
}

W8a16Plan plan_of(const fut_w8a16_tile& tile, int64_t m, int64_t n, int64_t k, int sm_count) {
  return tile.tokens != 0 ? W8a16Plan{tile.channels, tile.tokens, tile.splits, 0.f} : plan_w8a16(m, n, k, sm_count);
}

}  // namespace
}  // namespace fut

extern "C" fut_status fut_w8a16_plan(int32_t m, int32_t n, int32_t k, int32_t multiprocessors, fut_w8a16_tile* tile,
                                     int64_t* workspace_bytes) {
  using namespace fut;
  if (m < 1 || n < 1 || k < 1 || multiprocessors < 1)
    return fail(FUT_INVALID, "fut_w8a16_plan: a size is not positive");
  const fut_status status = check_tile(*tile, k);
  if (status != FUT_OK) return status;
  const W8a16Plan plan = plan_of(*tile, m, n, k, multiprocessors);
  *tile = {plan.channels, plan.tokens, plan.splits};
  *workspace_bytes = w8a16_workspace_bytes(m, n, plan);
  return FUT_OK;
}

extern "C" fut_status fut_w8a16(const fut_w8a16_call* c, void* stream) {
  using namespace fut;
  fut_status status = check_call(*c);
  if (status != FUT_OK) return status;
  Operands o = {};
  FUT_CHECK(multiprocessor_count(&o.sm_count));
  const W8a16Plan plan = plan_of(c->tile, c->m, c->n, c->k, o.sm_count);
  const int64_t needed = w8a16_workspace_bytes(c->m, c->n, plan);
  if (needed > c->workspace_bytes)
    return fail(FUT_INVALID, "fut_w8a16: the workspace has %lld bytes, needs %lld",
                static_cast<long long>(c->workspace_bytes), static_cast<long long>(needed));
  if (needed > 0 && reinterpret_cast<uintptr_t>(c->workspace) % 16 != 0)
    return fail(FUT_INVALID, "fut_w8a16: the workspace must be 16-byte aligned");
  const int out_bytes = c->out_is_f32 ? 4 : 2;
  status = describe_operand({"fut_w8a16: the weights", c->b, c->n, c->k, c->b_stride}, 1, plan.channels, kW8a16Stage,
                            &o.weights);
  if (status == FUT_OK)
    status = describe_operand({"fut_w8a16: the activations", c->a, c->m, c->k, 2 * c->a_stride}, 2, plan.tokens,
                              2 * kW8a16Stage, &o.activations);
  if (status == FUT_OK)
    status = check_view({"fut_w8a16: the output", c->out, c->m, c->n, out_bytes * c->out_stride}, out_bytes);
  if (status != FUT_OK) return status;
  W8a16Params& p = o.params;
  p.alpha = c->alpha;
  p.bias = c->bias;
  p.out = static_cast<uint8_t*>(c->out);
  p.out_stride_bytes = out_bytes * c->out_stride;
  p.m = c->m;
  p.n = c->n;
  p.stages = static_cast<int32_t>(ceil_divide(c->k, kW8a16Stage));
  p.splits = plan.splits;
  p.stages_a_split = stages_a_split(p.stages, p.splits);
  p.channel_tiles = static_cast<int32_t>(ceil_divide(c->n, plan.channels));
  p.token_tiles = static_cast<int32_t>(ceil_divide(c->m, plan.tokens));
  p.alpha_is_vector = c->alpha_is_vector;
  p.partial = static_cast<float*>(c->workspace);
  const int64_t tiles = w8a16_tiles(c->m, c->n, plan.channels, plan.tokens);
  p.counters = reinterpret_cast<uint32_t*>(p.partial + tiles * plan.splits * plan.channels * plan.tokens);
  o.stream = static_cast<cudaStream_t>(stream);
  if (c->is_fp16) return c->out_is_f32 ? launch_tile<Fp16, OutF32>(plan, o) : launch_tile<Fp16, Fp16>(plan, o);
  return c->out_is_f32 ? launch_tile<Bf16, OutF32>(plan, o) : launch_tile<Bf16, Bf16>(plan, o);
}
