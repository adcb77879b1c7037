// Whole prompts: one call a run, which launches every layer's kernels in turn.

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "../prefill/cache_copy.h"
#include "../prefill/gemm_call.h"
#include "../prefill/prompt_rows.h"
#include "decoder_view.h"
#include "error.h"
#include "prefill_workspace.h"

namespace {

using namespace fut;

constexpr int kStagings = 2;  // runs whose input may be on its way at once

fut_status check_matrix(const char* name, int layer, const fut_matrix& m, int rows, int cols, int format) {
  if (m.format != format)
    return fail(FUT_INVALID, "layer %d, %s: format %d, expected %d in all matrices", layer, name, m.format, format);
  if (m.rows != rows || m.cols != cols || m.stored_rows < rows || m.stored_cols < cols)
    return fail(FUT_INVALID, "layer %d, %s is %d x %d (stored %d x %d), expected %d x %d", layer, name, m.rows, m.cols,
                m.stored_rows, m.stored_cols, rows, cols);
  if (m.weight == nullptr || (format == FUT_E4M3 && m.scale == nullptr))
    return fail(FUT_INVALID, "layer %d, %s: weights or scales are missing", layer, name);
  if (format == FUT_E4M3 && m.gain != nullptr)
    return fail(FUT_INVALID, "layer %d, %s: its gain must be in the E4M3 weights", layer, name);
  return FUT_OK;
}

fut_status check_config(const fut_prefill_config& c, const fut_decoder_config& d) {
  const fut_attention_shape& s = d.attention;
  if (c.format != FUT_E4M3 && c.format != FUT_BF16)
    return fail(FUT_INVALID, "prefill: format %d is neither E4M3 nor BF16", c.format);
  if (c.max_rows < 1 || c.max_requests < 1 || c.history_pages < 1 || c.history == nullptr)
    return fail(FUT_INVALID, "prefill: %d rows of %d requests over %lld pages of history, expected at least 1 of each",
                c.max_rows, c.max_requests, static_cast<long long>(c.history_pages));
  if (c.states != 1 && c.states != d.max_slots)
    return fail(FUT_INVALID, "prefill: %d states of scales, expected 1 or %d", c.states, d.max_slots);
  if (c.format == FUT_E4M3 &&
      (c.scale == nullptr || c.amax == nullptr || c.saturated == nullptr || c.ignored == nullptr))
    return fail(FUT_INVALID, "prefill: the state of the activation scales is missing");
  if (d.hidden % 8 != 0) return fail(FUT_INVALID, "prefill: hidden is %d, expected a multiple of 8", d.hidden);
  const int q = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim;
  for (int i = 0; i < d.layers; ++i) {
    const fut_layer& layer = c.layer[i];
    for (const fut_status status : {check_matrix("qkv", i, layer.qkv, q + 2 * kv, d.hidden, c.format),
                                    check_matrix("o", i, layer.o, d.hidden, q, c.format),
                                    check_matrix("gate_up", i, layer.gate_up, 2 * d.intermediate, d.hidden, c.format),
                                    check_matrix("down", i, layer.down, d.hidden, d.intermediate, c.format)})
      if (status != FUT_OK) return status;
    if (layer.gate_up.row_order != FUT_INTERLEAVE1)
      return fail(FUT_INVALID, "layer %d, gate_up: its rows are in order %d, expected %d", i, layer.gate_up.row_order,
                  FUT_INTERLEAVE1);
  }
  return FUT_OK;
}

}  // namespace

struct fut_prefill {
  fut_prefill_config config;
  DecoderView decoder;
  std::vector<fut_layer> layers;
  PrefillWorkspace at;
  PrefillInput input;
  std::vector<bool> seen;  // slots, while a run is checked
  uint8_t* staging[kStagings] = {};
  cudaEvent_t copied[kStagings] = {};
  int turn = 0;
  int32_t last_rows = 0;  // of the last run

  fut_prefill(const fut_prefill_config& c, const DecoderView& d)
      : config(c),
        decoder(d),
        layers(c.layer, c.layer + d.config->layers),
        at(c, *d.config),
        input(c.max_rows, c.max_requests, c.states),
        seen(static_cast<size_t>(d.config->max_slots)) {
    config.layer = layers.data();
  }

  ~fut_prefill() {
    for (int i = 0; i < kStagings; ++i) {
      if (copied[i] != nullptr) cudaEventDestroy(copied[i]);
      cudaFreeHost(staging[i]);
    }
  }

  template <class T>
  T* place(int64_t offset) const {
    return reinterpret_cast<T*>(static_cast<uint8_t*>(config.workspace) + offset);
  }
  const int32_t* given(int64_t offset) const { return place<int32_t>(at.input + offset); }
  bool e4m3() const { return config.format == FUT_E4M3; }

  // What all kernels of a run need to know.
  struct Run {
    int32_t requests, rows, longest, spans;
    cudaStream_t stream;
  };

  fut_status check_run(const fut_prefill_chunks& chunks, Run* run);
  fut_status copy_input(const fut_prefill_chunks& chunks, Run* run);
  fut_e4m3_output e4m3_out(int64_t data, int64_t stride, int layer, Site site, const Run& run) const;
  fut_gemm_call product(const fut_matrix& matrix, int64_t a, int64_t a_stride, int layer, Site site,
                        const Run& run) const;
  fut_status normalized(fut_gemm_call* call, const float* gain, const Run& run) const;
  fut_status attend(int layer, const Run& run) const;
  fut_status run_layer(int layer, const Run& run) const;
  fut_status launch(const fut_prefill_chunks& chunks, const Run& run) const;
  fut_status head(const int32_t* gather, int32_t first, int32_t count, float* logits, bool dependent,
                  cudaStream_t stream) const;
  ActivationState scales(const fut_prefill_chunks& chunks, const Run& run) const;
};

fut_status fut_prefill::check_run(const fut_prefill_chunks& c, Run* run) {
  const fut_decoder_config& d = *decoder.config;
  if (c.requests < 1 || c.requests > config.max_requests)
    return fail(FUT_INVALID, "the run has %d requests, expected 1 to %d", c.requests, config.max_requests);
  std::fill(seen.begin(), seen.end(), false);
  int64_t rows = 0;
  for (int i = 0; i < c.requests; ++i) {
    if (c.slot[i] < 0 || c.slot[i] >= d.max_slots || seen[c.slot[i]])
      return fail(FUT_INVALID, "request %d: slot %d, expected 0 to %d, each once", i, c.slot[i], d.max_slots - 1);
    seen[c.slot[i]] = true;
    if (c.length[i] < 1 || c.position[i] < 0 || int64_t{c.position[i]} + c.length[i] > d.attention.max_context)
      return fail(FUT_INVALID, "request %d: %d tokens from position %d, expected some within %d", i, c.length[i],
                  c.position[i], d.attention.max_context);
    rows += c.length[i];
    run->longest = std::max(run->longest, c.length[i]);
  }
  if (rows > config.max_rows)
    return fail(FUT_INVALID, "the run has %lld rows, expected at most %d", static_cast<long long>(rows),
                config.max_rows);
  for (int64_t i = 0; i < rows; ++i)
    if (c.token[i] < 0 || c.token[i] >= d.vocab)
      return fail(FUT_INVALID, "row %lld: token %d, expected 0 to %d", static_cast<long long>(i), c.token[i],
                  d.vocab - 1);
  for (int i = 0; i < c.head_count; ++i)
    if (c.head[i] < (i == 0 ? 0 : c.head[i - 1] + 1) || c.head[i] >= c.requests)
      return fail(FUT_INVALID, "head[%d] is %d, expected ascending requests below %d", i, c.head[i], c.requests);
  if (c.head_count > 0 && c.logits == nullptr) return fail(FUT_INVALID, "there is no place for the logits");
  if (c.ended_count < 0 || c.ended_count > d.max_slots)
    return fail(FUT_INVALID, "%d calls end, expected 0 to %d", c.ended_count, d.max_slots);
  for (int i = 0; i < c.ended_count; ++i)
    if (c.ended[i] < 0 || c.ended[i] >= d.max_slots)
      return fail(FUT_INVALID, "ended[%d] is slot %d, expected 0 to %d", i, c.ended[i], d.max_slots - 1);
  run->requests = c.requests;
  run->rows = static_cast<int32_t>(rows);
  return FUT_OK;
}

fut_status fut_prefill::copy_input(const fut_prefill_chunks& c, Run* run) {
  turn = (turn + 1) % kStagings;
  FUT_CHECK(cudaEventSynchronize(copied[turn]));
  run->spans = input.fill(c, config.states, staging[turn]);
  FUT_CHECK(cudaMemcpyAsync(place<uint8_t>(at.input), staging[turn], input.bytes, cudaMemcpyHostToDevice, run->stream));
  FUT_CHECK(cudaEventRecord(copied[turn], run->stream));
  return FUT_OK;
}

ActivationState fut_prefill::scales(const fut_prefill_chunks& chunks, const Run& run) const {
  ActivationState s = {};
  s.scale = config.scale;
  s.amax = config.amax;
  s.ignored = reinterpret_cast<unsigned long long*>(config.ignored);
  s.run_scale = place<float>(at.run_scale);
  s.run_amax = place<uint32_t>(at.run_amax);
  s.state = given(input.state);
  s.ended = given(input.ended);
  s.sites = kSites * decoder.config->layers;
  s.states = config.states;
  s.requests = run.requests;
  s.ended_count = PrefillInput::ended_states(chunks, config.states);
  s.margin = config.margin;
  s.frozen = config.frozen != 0;
  return s;
}

fut_e4m3_output fut_prefill::e4m3_out(int64_t data, int64_t stride, int layer, Site site, const Run& run) const {
  const int64_t index = int64_t{layer} * kSites + site;
  return {place<uint8_t>(data), stride, place<float>(at.run_scale) + index * run.requests,
          place<uint32_t>(at.run_amax) + index * run.requests, config.saturated + index};
}

// A product of `matrix` with what lies at `a`; the epilogue is left to the caller.
fut_gemm_call fut_prefill::product(const fut_matrix& matrix, int64_t a, int64_t a_stride, int layer, Site site,
                                   const Run& run) const {
  fut_gemm_call call = {};
  call.a = place<uint8_t>(a);
  call.b = matrix.weight;
  call.a_stride = a_stride;
  call.b_stride = matrix.stored_cols;
  call.m = run.rows;
  call.n = matrix.rows;
  call.k = matrix.cols;
  call.format = config.format;
  call.accumulation = config.accumulation;
  call.bias = matrix.bias;
  if (e4m3()) {
    call.channel_scale = static_cast<const float*>(matrix.scale);
    call.a_scale = place<float>(at.run_scale) + (int64_t{layer} * kSites + site) * run.requests;
    call.row_request = given(input.request);
  }
  return call;
}

// RMSNorm before a product: E4M3 products take its factor in their epilogue, for BF16 ones h is normalised first.
fut_status fut_prefill::normalized(fut_gemm_call* call, const float* gain, const Run& run) const {
  const float eps = decoder.config->attention.rms_norm_eps;
  const float* square_sums = place<float>(at.square_sums);
  if (e4m3()) {
    call->square_sums = square_sums;
    call->square_parts = at.square_parts;
    call->eps = eps;
    return FUT_OK;
  }
  const NormalizeParams p = {place<uint8_t>(at.h),   square_sums,     gain, place<uint8_t>(at.x), run.rows,
                             decoder.config->hidden, at.square_parts, eps};
  return check_cuda(launch_normalize(p, true, run.stream), "normalize");
}

fut_status fut_prefill::attend(int layer, const Run& run) const {
  const fut_decoder_config& d = *decoder.config;
  const fut_attention_shape& s = d.attention;
  const int64_t store = config.history_pages * s.kv_heads * FUT_PAGE_TOKENS * s.head_dim * 2;
  uint8_t* k = static_cast<uint8_t*>(config.history) + 2 * layer * store;
  uint8_t* v = k + store;
  const fut_layer& weights = layers[layer];

  fut_qkv_output out = {};
  out.q = place<uint8_t>(at.q);
  out.k = k;
  out.v = v;
  out.rows = {nullptr, given(input.position), given(input.slot), place<int32_t>(at.page_table), at.table_width,
              run.rows};
  out.q_norm = weights.q_norm;
  out.k_norm = weights.k_norm;
  out.shape = s;
  fut_gemm_call qkv = product(weights.qkv, at.x, at.x_stride, layer, kSiteQkv, run);
  if (const fut_status status = normalized(&qkv, weights.qkv.gain, run); status != FUT_OK) return status;
  qkv.epilogue = FUT_GEMM_QKV;
  qkv.qkv = &out;
  if (const fut_status status = run_gemm(qkv, true, run.stream); status != FUT_OK) return status;

  fut_cache_copy_call copy = {};
  copy.cache = d.cache;
  copy.k = k;
  copy.v = v;
  copy.history_table = place<int32_t>(at.page_table);
  copy.cache_table = decoder.page_table;
  copy.spans = place<fut_page_span>(at.input + input.spans);
  copy.history_width = at.table_width;
  copy.cache_width = decoder.table_width;
  copy.count = run.spans;
  copy.layer = layer;
  FUT_CHECK(launch_cache_copy(copy, true, run.stream));

  fut_prefill_attention_call attention = {};
  attention.q = out.q;
  attention.k = k;
  attention.v = v;
  attention.pages = config.history_pages;
  attention.prompts = {given(input.first_row),
                       given(input.first_position),
                       given(input.request_slot),
                       place<int32_t>(at.page_table),
                       at.table_width,
                       run.requests,
                       run.rows,
                       run.longest};
  attention.shape = s;
  if (e4m3()) {
    attention.quantized = e4m3_out(at.attended, at.attended_stride, layer, kSiteO, run);
  } else {
    attention.out = place<uint8_t>(at.attended);
    attention.out_stride = at.attended_stride;
  }
  attention.workspace = place<uint8_t>(at.attention);
  attention.workspace_bytes = at.attention_bytes;
  return fut_prefill_attention(&attention, run.stream);
}

fut_status fut_prefill::run_layer(int layer, const Run& run) const {
  const fut_layer& weights = layers[layer];
  if (const fut_status status = attend(layer, run); status != FUT_OK) return status;
  // h += product; the E4M3 copy of the new h is what `next` of layer `next_layer` multiplies.
  const auto add = [&](fut_gemm_call call, int next_layer, Site next) {
    call.epilogue = FUT_GEMM_RESIDUAL;
    call.out = place<uint8_t>(at.h);
    call.residual = call.out;
    call.out_stride = call.residual_stride = decoder.config->hidden;
    call.out_square_sums = place<float>(at.square_sums);
    if (e4m3() && next_layer < decoder.config->layers)
      call.quantized = e4m3_out(at.x, at.x_stride, next_layer, next, run);
    return run_gemm(call, true, run.stream);
  };
  fut_status status = add(product(weights.o, at.attended, at.attended_stride, layer, kSiteO, run), layer, kSiteGateUp);
  if (status != FUT_OK) return status;
  fut_gemm_call gate_up = product(weights.gate_up, at.x, at.x_stride, layer, kSiteGateUp, run);
  status = normalized(&gate_up, weights.gate_up.gain, run);
  if (status != FUT_OK) return status;
  if (e4m3()) {
    gate_up.epilogue = FUT_GEMM_SWIGLU;
    gate_up.quantized = e4m3_out(at.gated, at.gated_stride, layer, kSiteDown, run);
  } else {
    gate_up.epilogue = FUT_GEMM_SWIGLU_BF16;
    gate_up.out = place<uint8_t>(at.gated);
    gate_up.out_stride = at.gated_stride;
  }
  status = run_gemm(gate_up, true, run.stream);
  if (status != FUT_OK) return status;
  return add(product(weights.down, at.gated, at.gated_stride, layer, kSiteDown, run), layer + 1, kSiteQkv);
}

fut_status fut_prefill::head(const int32_t* gather, int32_t first, int32_t count, float* logits, bool dependent,
                             cudaStream_t stream) const {
  const fut_decoder_config& d = *decoder.config;
  const ProjectionInput last = {place<uint8_t>(at.h) + int64_t{first} * d.hidden * 2,
                                place<float>(at.square_sums) + int64_t{first} * at.square_parts,
                                gather,
                                d.attention.rms_norm_eps,
                                at.square_parts,
                                count};
  return check_cuda(launch_projection(d.head, last, {logits, nullptr, FUT_STORE}, decoder.card, dependent, stream),
                    "the head of prefill");
}

// Every kernel of a run, in order. The first follows a copy, so it waits for the stream as usual.
fut_status fut_prefill::launch(const fut_prefill_chunks& chunks, const Run& run) const {
  const ActivationState state = scales(chunks, run);
  if (e4m3()) FUT_CHECK(launch_begin_scales(state, false, run.stream));
  EmbedPromptsParams embed = {};
  embed.embed = static_cast<const uint8_t*>(decoder.config->embed);
  embed.token = given(input.token);
  embed.h = place<uint8_t>(at.h);
  embed.square_sums = place<float>(at.square_sums);
  embed.rows = run.rows;
  embed.hidden = decoder.config->hidden;
  if (e4m3()) {
    const fut_e4m3_output first = e4m3_out(at.x, at.x_stride, 0, kSiteQkv, run);
    embed.quantized = {static_cast<uint8_t*>(first.data), first.stride, first.amax,
                       reinterpret_cast<unsigned long long*>(first.saturated)};
    embed.scale = first.scale;
    embed.row_request = given(input.request);
  }
  FUT_CHECK(launch_embed_prompts(embed, e4m3(), run.stream));
  for (int i = 0; i < decoder.config->layers; ++i)
    if (const fut_status status = run_layer(i, run); status != FUT_OK) return status;
  if (e4m3()) FUT_CHECK(launch_end_scales(state, true, run.stream));
  if (chunks.head_count == 0) return FUT_OK;
  return head(given(input.head_row), 0, chunks.head_count, chunks.logits, true, run.stream);
}

extern "C" {

int64_t fut_prefill_workspace_bytes(const fut_prefill_config* config, const fut_decoder_config* decoder) {
  return PrefillWorkspace(*config, *decoder).bytes;
}

fut_status fut_prefill_create(const fut_prefill_config* config, const fut_decoder* decoder, fut_prefill** prefill) {
  *prefill = nullptr;
  const DecoderView view = view_decoder(*decoder);
  if (const fut_status status = check_config(*config, *view.config); status != FUT_OK) return status;
  auto made = std::make_unique<fut_prefill>(*config, view);
  if (config->workspace == nullptr || reinterpret_cast<uintptr_t>(config->workspace) % 256 != 0)
    return fail(FUT_INVALID, "the workspace of prefill must be aligned to 256 bytes");
  if (config->workspace_bytes < made->at.bytes)
    return fail(FUT_INVALID, "the workspace of prefill has %lld bytes, needs %lld",
                static_cast<long long>(config->workspace_bytes), static_cast<long long>(made->at.bytes));
  for (int i = 0; i < kStagings; ++i) {
    FUT_CHECK(cudaMallocHost(reinterpret_cast<void**>(&made->staging[i]), made->input.bytes));
    std::memset(made->staging[i], 0, made->input.bytes);
    FUT_CHECK(cudaEventCreateWithFlags(&made->copied[i], cudaEventDisableTiming));
  }
  *prefill = made.release();
  return FUT_OK;
}

void fut_prefill_destroy(fut_prefill* prefill) { delete prefill; }

fut_status fut_prefill_set_pages(fut_prefill* p, int32_t slot, int32_t first, const int32_t* pages, int32_t count,
                                 void* stream) {
  const int32_t slots = p->decoder.config->max_slots;
  if (slot < 0 || slot >= slots || first < 0 || count < 0 || first + count > p->at.table_width)
    return fail(FUT_INVALID, "history: slot %d, pages %d to %d: the table has %d slots of %d pages", slot, first,
                first + count, slots, p->at.table_width);
  for (int32_t i = 0; i < count; ++i)
    if (pages[i] < 0 || pages[i] >= p->config.history_pages)
      return fail(FUT_INVALID, "history: page %d, expected 0 to %lld", pages[i],
                  static_cast<long long>(p->config.history_pages) - 1);
  int32_t* to = p->place<int32_t>(p->at.page_table) + static_cast<int64_t>(slot) * p->at.table_width + first;
  FUT_CHECK(
      cudaMemcpyAsync(to, pages, count * sizeof(int32_t), cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream)));
  return FUT_OK;
}

fut_status fut_prefill_run(fut_prefill* p, const fut_prefill_chunks* chunks, void* stream) {
  fut_prefill::Run run = {};
  run.stream = static_cast<cudaStream_t>(stream);
  if (const fut_status status = p->check_run(*chunks, &run); status != FUT_OK) return status;
  p->last_rows = 0;
  if (const fut_status status = p->copy_input(*chunks, &run); status != FUT_OK) return status;
  if (const fut_status status = p->launch(*chunks, run); status != FUT_OK) return status;
  p->last_rows = run.rows;
  return FUT_OK;
}

fut_status fut_prefill_logits(fut_prefill* p, int32_t first, int32_t count, float* logits, void* stream) {
  if (first < 0 || count < 1 || first > p->last_rows - count || logits == nullptr)
    return fail(FUT_INVALID, "logits of rows %d to %d, the last run has %d", first, first + count, p->last_rows);
  return p->head(nullptr, first, count, logits, false, static_cast<cudaStream_t>(stream));
}

}  // extern "C"
