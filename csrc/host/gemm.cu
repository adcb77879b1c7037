// fut_gemm: checks a call and hands it to its epilogue's launcher.

#include "../prefill/gemm_call.h"
#include "error.h"

namespace fut {

cudaError_t multiprocessor_count(int* count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

namespace {

fut_status check_call(const fut_gemm_call& c) {
  if (c.m < 1 || c.n < 1 || c.k < 1)
    return fail(FUT_INVALID, "fut_gemm: m, n and k are %d, %d and %d, expected at least 1", c.m, c.n, c.k);
  if (c.format != FUT_E4M3 && c.format != FUT_BF16)
    return fail(FUT_INVALID, "fut_gemm: format %d is neither E4M3 nor BF16", c.format);
  if (c.accumulation != FUT_ACCUMULATE_FAST && c.accumulation != FUT_ACCUMULATE_PROMOTED)
    return fail(FUT_INVALID, "fut_gemm: accumulation %d is unknown", c.accumulation);
  if ((c.tile_n != 0 && c.tile_n != 128 && c.tile_n != 256) || c.cluster < (c.tile_n != 0) || c.cluster > 2)
    return fail(FUT_INVALID, "fut_gemm: no tile of %d columns in clusters of %d", c.tile_n, c.cluster);
  if (c.square_sums != nullptr && c.square_parts < 1)
    return fail(FUT_INVALID, "fut_gemm: square_parts is %d, expected at least 1", c.square_parts);
  return FUT_OK;
}

fut_status check_output(const char* name, const void* data, int64_t rows, int64_t columns, int64_t stride, int bytes) {
  return check_view({name, data, rows, columns, stride * bytes}, bytes);
}

fut_status quantized_out(const fut_e4m3_output& q, int64_t rows, int64_t columns, QuantizedOut* out) {
  if (q.scale == nullptr) return fail(FUT_INVALID, "fut_gemm: the E4M3 output has no scale");
  static_assert(sizeof(unsigned long long) == sizeof *q.saturated, "a counter is 64 bits");
  *out = {static_cast<uint8_t*>(q.data), q.stride, q.amax, reinterpret_cast<unsigned long long*>(q.saturated)};
  return check_output("fut_gemm: the E4M3 output", q.data, rows, columns, q.stride, 1);
}

fut_status run_residual(const fut_gemm_call& c, const GemmCall& call) {
  ResidualParams p = {};
  p.residual = static_cast<const uint8_t*>(c.residual);
  p.out = static_cast<uint8_t*>(c.out);
  p.residual_stride_bytes = 2 * c.residual_stride;
  p.out_stride_bytes = 2 * c.out_stride;
  p.square_sums = c.out_square_sums;
  p.square_parts = static_cast<int32_t>(ceil_divide(c.n, kSquareColumns));
  fut_status status = check_output("fut_gemm: the residual", c.residual, c.m, c.n, c.residual_stride, 2);
  if (status == FUT_OK) status = check_output("fut_gemm: the output", c.out, c.m, c.n, c.out_stride, 2);
  if (status == FUT_OK && c.quantized.data != nullptr) status = quantized_out(c.quantized, c.m, c.n, &p.quantized);
  return status == FUT_OK ? launch_residual(call, p) : status;
}

fut_status run_swiglu(const fut_gemm_call& c, const GemmCall& call) {
  QuantizedOut out = {};
  if (c.n % 2 != 0) return fail(FUT_INVALID, "fut_gemm: n is %d, expected pairs of gate and up", c.n);
  const fut_status status = quantized_out(c.quantized, c.m, c.n / 2, &out);
  return status == FUT_OK ? launch_swiglu(call, out) : status;
}

fut_status run_qkv(const fut_gemm_call& c, const GemmCall& call) {
  if (c.qkv == nullptr) return fail(FUT_INVALID, "fut_gemm: no outputs for Q, K and V");
  const fut_qkv_output& o = *c.qkv;
  const fut_attention_shape& s = o.shape;
  if (s.heads < 1 || s.kv_heads < 1 || c.n != (s.heads + 2 * s.kv_heads) * s.head_dim)
    return fail(FUT_INVALID, "fut_gemm: n is %d, expected %d and twice %d heads of %d", c.n, s.heads, s.kv_heads,
                s.head_dim);
  if (o.rows.position == nullptr || o.rows.slot == nullptr || o.rows.page_table == nullptr || s.rope_cos == nullptr ||
      s.rope_sin == nullptr)
    return fail(FUT_INVALID, "fut_gemm: positions, slots, the page table or the RoPE tables are missing");
  if ((o.q_norm == nullptr) != (o.k_norm == nullptr))
    return fail(FUT_INVALID, "fut_gemm: the gains of q and k come together");
  const int64_t kv_columns = int64_t{s.kv_heads} * s.head_dim;
  const int64_t q_columns = int64_t{s.heads} * s.head_dim;
  fut_status status = check_output("fut_gemm: Q", o.q, c.m, q_columns, q_columns, 2);
  if (status == FUT_OK) status = check_output("fut_gemm: the history of K", o.k, c.m, kv_columns, kv_columns, 2);
  if (status == FUT_OK) status = check_output("fut_gemm: the history of V", o.v, c.m, kv_columns, kv_columns, 2);
  if (status != FUT_OK) return status;
  const QkvParams p = {static_cast<uint8_t*>(o.q),
                       static_cast<uint8_t*>(o.k),
                       static_cast<uint8_t*>(o.v),
                       o.q_norm,
                       o.k_norm,
                       s.rope_cos,
                       s.rope_sin,
                       2 * q_columns,
                       s.heads,
                       s.kv_heads,
                       s.rms_norm_eps};
  GemmCall placed = call;
  placed.scales.tokens = {o.rows.position, o.rows.slot, o.rows.page_table, o.rows.table_width};
  return launch_qkv(placed, p, s.head_dim);
}

}  // namespace

fut_status run_gemm(const fut_gemm_call& c, bool dependent, cudaStream_t stream) {
  fut_status status = check_call(c);
  if (status != FUT_OK) return status;
  const int bytes = c.format == FUT_BF16 ? 2 : 1;
  GemmCall call = {};
  call.a = {"fut_gemm: A", c.a, c.m, c.k, c.a_stride * bytes};
  call.b = {"fut_gemm: B", c.b, c.n, c.k, c.b_stride * bytes};
  call.m = c.m;
  call.n = c.n;
  call.k = c.k;
  call.format = c.format;
  call.promoted = c.accumulation == FUT_ACCUMULATE_PROMOTED;
  call.scales.row_factor = c.row_factor;
  call.scales.square_sums = c.square_sums;
  call.scales.a_scale = c.a_scale;
  call.scales.row_request = c.row_request;
  call.scales.channel_scale = c.channel_scale;
  call.scales.bias = c.bias;
  call.scales.out_scale = c.quantized.scale;
  call.scales.square_parts = c.square_parts;
  call.scales.inverse_columns = 1.f / static_cast<float>(c.k);
  call.scales.eps = c.eps;
  call.plan = {c.tile_n, c.cluster, c.cluster == 0 ? 0 : group_rows(c.cluster), 0.f};
  call.dependent = dependent;
  call.stream = stream;
  switch (c.epilogue) {
    case FUT_GEMM_BF16:
      status = check_output("fut_gemm: the output", c.out, c.m, c.n, c.out_stride, 2);
      return status == FUT_OK ? launch_store_bf16(call, c.out, 2 * c.out_stride) : status;
    case FUT_GEMM_F32:
      status = check_output("fut_gemm: the output", c.out, c.m, c.n, c.out_stride, 4);
      return status == FUT_OK ? launch_store_f32(call, c.out, 4 * c.out_stride) : status;
    case FUT_GEMM_RESIDUAL:
      return run_residual(c, call);
    case FUT_GEMM_SWIGLU:
      return run_swiglu(c, call);
    case FUT_GEMM_SWIGLU_BF16:
      if (c.n % 2 != 0) return fail(FUT_INVALID, "fut_gemm: n is %d, expected pairs of gate and up", c.n);
      status = check_output("fut_gemm: the output", c.out, c.m, c.n / 2, c.out_stride, 2);
      return status == FUT_OK ? launch_swiglu_bf16(call, c.out, 2 * c.out_stride) : status;
    case FUT_GEMM_QKV:
      return run_qkv(c, call);
    default:
      return fail(FUT_INVALID, "fut_gemm: epilogue %d is unknown", c.epilogue);
  }
}

}  // namespace fut

extern "C" fut_status fut_gemm_plan(int32_t m, int32_t n, int32_t k, int32_t format, int32_t accumulation,
                                    int32_t head_dim, int32_t multiprocessors, fut_gemm_tile* tile) {
  using namespace fut;
  if (m < 1 || n < 1 || k < 1 || multiprocessors < 2 || head_dim < 0 || head_dim > 128)
    return fail(FUT_INVALID, "fut_gemm_plan: a size is out of range");
  const bool bf16 = format == FUT_BF16;
  const GemmPlan plan = plan_gemm(
      {m, n, int64_t{k} * (bf16 ? 2 : 1), head_dim, multiprocessors, !bf16 && accumulation == FUT_ACCUMULATE_PROMOTED});
  *tile = {plan.tile_n, plan.cluster, plan.group_m, plan.clocks};
  return FUT_OK;
}

extern "C" fut_status fut_gemm(const fut_gemm_call* call, void* stream) {
  return fut::run_gemm(*call, false, static_cast<cudaStream_t>(stream));
}
