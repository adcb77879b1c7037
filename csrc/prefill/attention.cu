// Launches attention of prompts for each head_dim.

#include <atomic>
#include <cmath>

#include "../host/error.h"
#include "../host/kernel_launch.h"
#include "attention.cuh"
#include "attention_call.h"

namespace fut {

namespace {

template <int kDim>
fut_status launch(const PrefillAttentionCall& call, AttentionParams params) {
  constexpr int kSharedBytes = sizeof(AttentionShared<kDim>);
  static_assert(kSharedBytes <= 232448, "an SM has 227 KB for a block");
  const auto kernel = prefill_attention<kDim>;
  static std::atomic<int> known{0};
  int count = known;
  if (count == 0) {
    FUT_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    FUT_CHECK(multiprocessor_count(&count));
    known = count;
  }
  CUtensorMap map_k, map_v;
  constexpr int kRowBytes = HeadLayout<kDim>::kRowBytes;
  fut_status status = describe_operand(call.k, 2, FUT_PAGE_TOKENS, kRowBytes, &map_k);
  if (status == FUT_OK) status = describe_operand(call.v, 2, FUT_PAGE_TOKENS, kRowBytes, &map_v);
  if (status != FUT_OK) return status;
  params.scale_log2 = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(kDim)));
  // At most: a tile of every request may be short.
  const int64_t most = ceil_divide(int64_t{call.prompts.rows} * params.group, kAttentionRows) + call.prompts.requests;
  const int64_t tiles = most * params.kv_heads;
  const LaunchShape shape = {dim3(static_cast<unsigned>(tiles < count ? tiles : count)), kAttentionThreads,
                             kSharedBytes, 1, call.dependent};
  FUT_CHECK(launch_kernel(kernel, shape, call.stream, map_k, map_v, params));
  return FUT_OK;
}

}  // namespace

fut_status launch_prefill_attention(const PrefillAttentionCall& call) {
  AttentionParams p = {};
  p.q = call.q;
  p.out = call.out;
  p.out_stride_bytes = call.out_stride_bytes;
  p.quantized = call.quantized;
  p.out_scale = call.out_scale;
  p.first_row = call.prompts.first_row;
  p.first_position = call.prompts.first_position;
  p.slot = call.prompts.slot;
  p.page_table = call.prompts.page_table;
  p.table_width = call.prompts.table_width;
  p.requests = call.prompts.requests;
  p.kv_heads = call.kv_heads;
  p.group = call.group;
  p.no_row = static_cast<int32_t>(call.k.rows);
  p.counters = call.counters;
  switch (call.head_dim) {
    case 64:
      return launch<64>(call, p);
    case 80:
      return launch<80>(call, p);
    case 96:
      return launch<96>(call, p);
    default:
      return launch<128>(call, p);
  }
}

}  // namespace fut
