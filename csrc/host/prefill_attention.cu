// fut_prefill_attention: checks a call and hands it to the kernel of its head_dim.

#include "../prefill/attention_call.h"
#include "error.h"

namespace fut {

namespace {

fut_status check_prompts(const fut_prompts& p, int group, int kv_heads) {
  if (p.requests < 1 || p.rows < 0 || p.table_width < 1)
    return fail(FUT_INVALID, "fut_prefill_attention: %d requests, %d rows, pages in rows of %d", p.requests, p.rows,
                p.table_width);
  if (p.max_chunk < 0 || p.max_chunk > p.rows)
    return fail(FUT_INVALID, "fut_prefill_attention: max_chunk is %d, expected 0 to %d rows", p.max_chunk, p.rows);
  if (int64_t{p.requests} * p.max_chunk < p.rows)
    return fail(FUT_INVALID, "fut_prefill_attention: max_chunk is %d, too few for %d rows of %d requests", p.max_chunk,
                p.rows, p.requests);
  if (p.first_row == nullptr || p.first_position == nullptr || p.slot == nullptr || p.page_table == nullptr)
    return fail(FUT_INVALID, "fut_prefill_attention: first rows, first positions, slots or the page table are missing");
  // Rows of tiles, and tiles, are counted in 32 bits.
  if ((int64_t{p.rows} + p.requests) * group * kv_heads > INT32_MAX / 2)
    return fail(FUT_INVALID, "fut_prefill_attention: %d rows of %d heads are too many", p.rows, group * kv_heads);
  return FUT_OK;
}

fut_status check_outputs(const fut_prefill_attention_call& c, int64_t columns) {
  if (c.out == nullptr && c.quantized.data == nullptr)
    return fail(FUT_INVALID, "fut_prefill_attention: there is neither a BF16 nor an E4M3 output");
  if (c.out != nullptr) {
    const fut_status checked =
        check_view({"fut_prefill_attention: the output", c.out, c.prompts.rows, columns, 2 * c.out_stride}, 2);
    if (checked != FUT_OK) return checked;
  }
  if (c.quantized.data == nullptr) return FUT_OK;
  if (c.quantized.scale == nullptr) return fail(FUT_INVALID, "fut_prefill_attention: the E4M3 output has no scale");
  return check_view(
      {"fut_prefill_attention: the E4M3 output", c.quantized.data, c.prompts.rows, columns, c.quantized.stride}, 1);
}

}  // namespace
}  // namespace fut

extern "C" int64_t fut_prefill_attention_workspace_bytes(int32_t, int32_t, int32_t) {
  return fut::kPrefillAttentionWorkspace;
}

extern "C" fut_status fut_prefill_attention(const fut_prefill_attention_call* c, void* stream) {
  using namespace fut;
  const fut_attention_shape& s = c->shape;
  if (s.head_dim != 64 && s.head_dim != 80 && s.head_dim != 96 && s.head_dim != 128)
    return fail(FUT_INVALID, "fut_prefill_attention: head_dim is %d, expected 64, 80, 96 or 128", s.head_dim);
  if (s.kv_heads < 1 || s.heads < 1 || s.heads % s.kv_heads != 0)
    return fail(FUT_INVALID, "fut_prefill_attention: %d heads are not shared out evenly over %d KV heads", s.heads,
                s.kv_heads);
  fut_status status = check_prompts(c->prompts, s.heads / s.kv_heads, s.kv_heads);
  if (status != FUT_OK) return status;
  // A page's tokens of one KV head are rows of one matrix, whose rows the copy engine counts in 32 bits.
  const int64_t tokens = c->pages * s.kv_heads * FUT_PAGE_TOKENS;
  if (c->pages < 1 || tokens > INT32_MAX - FUT_PAGE_TOKENS)
    return fail(FUT_INVALID, "fut_prefill_attention: %lld pages of %d KV heads, expected 1 to %d",
                static_cast<long long>(c->pages), s.kv_heads, (INT32_MAX / FUT_PAGE_TOKENS - 1) / s.kv_heads);
  const int64_t columns = int64_t{s.heads} * s.head_dim;
  const MatrixView q = {"fut_prefill_attention: Q", c->q, c->prompts.rows, columns, 2 * columns};
  const MatrixView k = {"fut_prefill_attention: the history of K", c->k, tokens, s.head_dim, 2 * s.head_dim};
  const MatrixView v = {"fut_prefill_attention: the history of V", c->v, tokens, s.head_dim, 2 * s.head_dim};
  for (const MatrixView& view : {q, k, v})
    if (status == FUT_OK) status = check_view(view, 2);
  if (status == FUT_OK) status = check_outputs(*c, columns);
  if (status != FUT_OK) return status;
  if (c->workspace == nullptr || c->workspace_bytes < kPrefillAttentionWorkspace)
    return fail(FUT_INVALID, "fut_prefill_attention: the workspace has %lld bytes, needs %lld",
                static_cast<long long>(c->workspace == nullptr ? 0 : c->workspace_bytes),
                static_cast<long long>(kPrefillAttentionWorkspace));
  if (c->prompts.rows == 0) return FUT_OK;
  static_assert(sizeof(unsigned long long) == sizeof *c->quantized.saturated, "a counter is 64 bits");
  PrefillAttentionCall call = {};
  call.k = k;
  call.v = v;
  call.q = static_cast<const uint8_t*>(c->q);
  call.prompts = c->prompts;
  call.kv_heads = s.kv_heads;
  call.group = s.heads / s.kv_heads;
  call.head_dim = s.head_dim;
  call.out = static_cast<uint8_t*>(c->out);
  call.out_stride_bytes = 2 * c->out_stride;
  call.out_scale = c->quantized.scale;
  call.quantized = {static_cast<uint8_t*>(c->quantized.data), c->quantized.stride, c->quantized.amax,
                    reinterpret_cast<unsigned long long*>(c->quantized.saturated)};
  call.counters = static_cast<uint32_t*>(c->workspace);
  call.stream = static_cast<cudaStream_t>(stream);
  return launch_prefill_attention(call);
}
