// The decoder: one call a step, a captured graph where the same step comes again.

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "../decode/attention.cuh"
#include "../decode/embed.h"
#include "../decode/projection.h"
#include "../decode/sampling.cuh"
#include "decoder_view.h"
#include "decoder_workspace.h"
#include "error.h"

namespace {

using namespace fut;

constexpr int kMostRows = 64;
constexpr int kStagings = 2;  // steps whose input may be on its way at once

// Steps that differ in nothing here run the same kernels on the same addresses.
struct GraphKey {
  int rows;
  bool sampled;
  bool operator<(const GraphKey& other) const {
    return rows != other.rows ? rows < other.rows : sampled < other.sampled;
  }
};

fut_status check_config(const fut_decoder_config& c) {
  if (c.max_rows < 1 || c.max_rows > kMostRows)
    return fail(FUT_INVALID, "max_rows is %d, expected 1 to %d", c.max_rows, kMostRows);
  if (c.max_slots < 1 || c.layers < 1 || c.hidden < 1 || c.vocab < 1 || c.intermediate < 1)
    return fail(FUT_INVALID, "a size of the decoder's configuration is not positive");
  const int q = c.attention.heads * c.attention.head_dim, kv = c.attention.kv_heads * c.attention.head_dim;
  const auto check = [&](const char* name, int layer, const fut_matrix& m, int rows, int cols) {
    if (const char* problem = projection_problem(m)) return fail(FUT_INVALID, "layer %d, %s: %s", layer, name, problem);
    if (m.rows != rows || m.cols != cols)
      return fail(FUT_INVALID, "layer %d, %s is %d x %d, expected %d x %d", layer, name, m.rows, m.cols, rows, cols);
    return FUT_OK;
  };
  for (int i = 0; i < c.layers; ++i) {
    const fut_layer& layer = c.layer[i];
    for (const fut_status status :
         {check("qkv", i, layer.qkv, q + 2 * kv, c.hidden), check("o", i, layer.o, c.hidden, q),
          check("gate_up", i, layer.gate_up, 2 * c.intermediate, c.hidden),
          check("down", i, layer.down, c.hidden, c.intermediate)})
      if (status != FUT_OK) return status;
    if (layer.gate_up.row_order != (layer.gate_up.format == FUT_INT4 ? FUT_INTERLEAVE8 : FUT_INTERLEAVE1))
      return fail(FUT_INVALID, "layer %d, gate_up: its rows are in order %d, which its format has not", i,
                  layer.gate_up.row_order);
  }
  return check("head", c.layers, c.head, c.vocab, c.hidden);
}

}  // namespace

struct fut_decoder {
  fut_decoder_config config;
  std::vector<fut_layer> layers;
  DecoderWorkspace at;
  StepInput input;
  CardLimits card;
  std::map<GraphKey, cudaGraphExec_t> graphs;
  cudaStream_t capture = nullptr;
  uint8_t* staging[kStagings] = {};
  cudaEvent_t copied[kStagings] = {};
  int32_t* chosen = nullptr;  // pinned
  int turn = 0;

  explicit fut_decoder(const fut_decoder_config& c)
      : config(c), layers(c.layer, c.layer + c.layers), at(c), input(c.max_rows), card{} {
    config.layer = layers.data();
  }

  ~fut_decoder() {
    for (const auto& entry : graphs) cudaGraphExecDestroy(entry.second);
    if (capture != nullptr) cudaStreamDestroy(capture);
    for (int i = 0; i < kStagings; ++i) {
      if (copied[i] != nullptr) cudaEventDestroy(copied[i]);
      cudaFreeHost(staging[i]);
    }
    cudaFreeHost(chosen);
  }

  template <class T>
  T* place(int64_t offset) const {
    return reinterpret_cast<T*>(static_cast<uint8_t*>(config.workspace) + offset);
  }

  fut_status launch(int rows, int head_rows, bool gathered, bool chunked, bool sampled, cudaStream_t stream) const;
  fut_status graph(const GraphKey& key, cudaGraphExec_t* found);
  fut_status check_step(const fut_step& step) const;
  fut_status copy_input(const fut_step& step, cudaStream_t stream);
};

// Every kernel of a step, in order.
fut_status fut_decoder::launch(int rows, int head_rows, bool gathered, bool chunked, bool sampled,
                               cudaStream_t stream) const {
  const fut_decoder_config& c = config;
  const auto* step_token = place<int32_t>(at.input + input.token);
  auto* h = place<uint8_t>(at.h);
  auto* square_sums = place<float>(at.square_sums);
  auto* qkv = place<float>(at.qkv);
  FUT_CHECK(launch_embed(c.embed, step_token, h, square_sums, rows, c.hidden, stream));
  const ProjectionInput normed = {h, square_sums, nullptr, c.attention.rms_norm_eps, at.square_parts, rows};
  AttentionCall attention = {};
  attention.shape = c.attention;
  attention.cache = c.cache;
  attention.rows = {step_token,
                    place<int32_t>(at.input + input.position),
                    place<int32_t>(at.input + input.slot),
                    place<int32_t>(at.page_table),
                    at.table_width,
                    rows};
  attention.qkv = qkv;
  attention.out = place<uint8_t>(at.attended);
  attention.workspace = place<uint8_t>(at.attention);
  attention.chunked = chunked;
  attention.dependent = true;
  attention.cache_ready = !chunked;
  for (int i = 0; i < c.layers; ++i) {
    const fut_layer& layer = layers[i];
    FUT_CHECK(launch_projection(layer.qkv, normed, {qkv, nullptr, FUT_STORE}, card, true, stream));
    attention.layer = i;
    attention.q_norm = layer.q_norm;
    attention.k_norm = layer.k_norm;
    FUT_CHECK(launch_attention(attention, stream));
    const ProjectionInput attended = {attention.out, nullptr, nullptr, 0.f, 0, rows};
    FUT_CHECK(launch_projection(layer.o, attended, {h, square_sums, FUT_RESIDUAL}, card, true, stream));
    auto* gated = place<uint8_t>(at.gated);
    FUT_CHECK(launch_projection(layer.gate_up, normed, {gated, nullptr, FUT_SWIGLU}, card, true, stream));
    const ProjectionInput swiglu = {gated, nullptr, nullptr, 0.f, 0, rows};
    FUT_CHECK(launch_projection(layer.down, swiglu, {h, square_sums, FUT_RESIDUAL}, card, true, stream));
  }
  if (head_rows == 0) return FUT_OK;
  ProjectionInput last = normed;
  last.tokens = head_rows;
  if (gathered) last.gather = place<int32_t>(at.input + input.head_row);
  auto* logits = place<float>(at.logits);
  FUT_CHECK(launch_projection(c.head, last, {logits, nullptr, FUT_STORE}, card, true, stream));
  if (sampled)
    FUT_CHECK(launch_sampling(logits, place<fut_sampling>(at.input + input.sampling), place<int32_t>(at.tokens),
                              head_rows, c.vocab, nullptr, stream, true));
  return FUT_OK;
}

fut_status fut_decoder::graph(const GraphKey& key, cudaGraphExec_t* found) {
  const auto known = graphs.find(key);
  if (known != graphs.end()) {
    *found = known->second;
    return FUT_OK;
  }
  FUT_CHECK(cudaStreamBeginCapture(capture, cudaStreamCaptureModeRelaxed));
  const fut_status launched = launch(key.rows, key.rows, false, false, key.sampled, capture);
  cudaGraph_t recorded = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(capture, &recorded);
  if (launched != FUT_OK) {
    if (recorded != nullptr) cudaGraphDestroy(recorded);
    return launched;
  }
  FUT_CHECK(ended);
  cudaGraphExec_t executable = nullptr;
  const cudaError_t made = cudaGraphInstantiate(&executable, recorded, 0);
  cudaGraphDestroy(recorded);
  FUT_CHECK(made);
  *found = graphs[key] = executable;
  return FUT_OK;
}

fut_status fut_decoder::check_step(const fut_step& s) const {
  const fut_decoder_config& c = config;
  if (s.rows < 1 || s.rows > c.max_rows)
    return fail(FUT_INVALID, "the step has %d rows, expected 1 to %d", s.rows, c.max_rows);
  for (int i = 0; i < s.rows; ++i) {
    if (s.token[i] < 0 || s.token[i] >= c.vocab)
      return fail(FUT_INVALID, "row %d: token %d, expected 0 to %d", i, s.token[i], c.vocab - 1);
    if (s.position[i] < 0 || s.position[i] >= c.attention.max_context)
      return fail(FUT_INVALID, "row %d: position %d, expected 0 to %d", i, s.position[i], c.attention.max_context - 1);
    if (s.slot[i] < 0 || s.slot[i] >= c.max_slots)
      return fail(FUT_INVALID, "row %d: slot %d, expected 0 to %d", i, s.slot[i], c.max_slots - 1);
  }
  if (s.head_rows < 0 || s.head_rows > s.rows)
    return fail(FUT_INVALID, "%d rows get logits, expected 0 to %d", s.head_rows, s.rows);
  for (int i = 0; i < s.head_rows; ++i)
    if (s.head_row[i] < (i == 0 ? 0 : s.head_row[i - 1] + 1) || s.head_row[i] >= s.rows)
      return fail(FUT_INVALID, "head_row[%d] is %d, expected ascending rows below %d", i, s.head_row[i], s.rows);
  return FUT_OK;
}

fut_status fut_decoder::copy_input(const fut_step& s, cudaStream_t stream) {
  turn = (turn + 1) % kStagings;
  uint8_t* to = staging[turn];
  FUT_CHECK(cudaEventSynchronize(copied[turn]));
  std::memcpy(to + input.token, s.token, s.rows * sizeof(int32_t));
  std::memcpy(to + input.position, s.position, s.rows * sizeof(int32_t));
  std::memcpy(to + input.slot, s.slot, s.rows * sizeof(int32_t));
  std::memcpy(to + input.head_row, s.head_row, s.head_rows * sizeof(int32_t));
  if (s.sampling != nullptr) std::memcpy(to + input.sampling, s.sampling, s.head_rows * sizeof(fut_sampling));
  FUT_CHECK(cudaMemcpyAsync(place<uint8_t>(at.input), to, input.bytes, cudaMemcpyHostToDevice, stream));
  FUT_CHECK(cudaEventRecord(copied[turn], stream));
  return FUT_OK;
}

namespace fut {

DecoderView view_decoder(const fut_decoder& decoder) {
  return {&decoder.config, decoder.place<int32_t>(decoder.at.page_table), decoder.at.table_width, decoder.card};
}

}  // namespace fut

extern "C" {

int64_t fut_decoder_workspace_bytes(const fut_decoder_config* config) { return DecoderWorkspace(*config).bytes; }

fut_status fut_decoder_create(const fut_decoder_config* config, fut_decoder** decoder) {
  *decoder = nullptr;
  if (const fut_status status = check_config(*config); status != FUT_OK) return status;
  auto made = std::make_unique<fut_decoder>(*config);
  if (config->workspace == nullptr || reinterpret_cast<uintptr_t>(config->workspace) % 256 != 0)
    return fail(FUT_INVALID, "the workspace must be aligned to 256 bytes");
  if (config->workspace_bytes < made->at.bytes)
    return fail(FUT_INVALID, "the workspace has %lld bytes, needs %lld",
                static_cast<long long>(config->workspace_bytes), static_cast<long long>(made->at.bytes));
  FUT_CHECK(card_limits(&made->card));
  AttentionCall attention = {};
  attention.shape = config->attention;
  attention.cache = config->cache;
  attention.rows = {made->place<int32_t>(made->at.input),
                    made->place<int32_t>(made->at.input),
                    made->place<int32_t>(made->at.input),
                    made->place<int32_t>(made->at.page_table),
                    made->at.table_width,
                    config->max_rows};
  attention.qkv = made->place<float>(made->at.qkv);
  attention.out = made->place<uint8_t>(made->at.attended);
  attention.workspace = made->place<uint8_t>(made->at.attention);
  if (const fut_status status =
          check_attention(attention, attention_workspace_bytes(config->attention, config->max_rows));
      status != FUT_OK)
    return status;
  FUT_CHECK(cudaStreamCreateWithFlags(&made->capture, cudaStreamNonBlocking));
  for (int i = 0; i < kStagings; ++i) {
    FUT_CHECK(cudaMallocHost(reinterpret_cast<void**>(&made->staging[i]), made->input.bytes));
    std::memset(made->staging[i], 0, made->input.bytes);
    FUT_CHECK(cudaEventCreateWithFlags(&made->copied[i], cudaEventDisableTiming));
  }
  FUT_CHECK(cudaMallocHost(reinterpret_cast<void**>(&made->chosen), config->max_rows * sizeof(int32_t)));
  *decoder = made.release();
  return FUT_OK;
}

void fut_decoder_destroy(fut_decoder* decoder) { delete decoder; }

fut_status fut_decoder_set_pages(fut_decoder* d, int32_t slot, int32_t first, const int32_t* pages, int32_t count,
                                 void* stream) {
  if (slot < 0 || slot >= d->config.max_slots || first < 0 || count < 0 || first + count > d->at.table_width)
    return fail(FUT_INVALID, "slot %d, pages %d to %d: the table has %d slots of %d pages", slot, first, first + count,
                d->config.max_slots, d->at.table_width);
  for (int32_t i = 0; i < count; ++i)
    if (pages[i] < 0 || pages[i] >= d->config.cache.pages)
      return fail(FUT_INVALID, "page %d, expected 0 to %lld", pages[i],
                  static_cast<long long>(d->config.cache.pages) - 1);
  int32_t* to = d->place<int32_t>(d->at.page_table) + static_cast<int64_t>(slot) * d->at.table_width + first;
  FUT_CHECK(
      cudaMemcpyAsync(to, pages, count * sizeof(int32_t), cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream)));
  return FUT_OK;
}

fut_status fut_decoder_step(fut_decoder* d, const fut_step* step, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  if (const fut_status status = d->check_step(*step); status != FUT_OK) return status;
  const bool sampled = step->sampling != nullptr && step->head_rows > 0;
  cudaGraphExec_t graph = nullptr;
  const bool repeats = step->chunked == 0 && step->head_rows == step->rows;
  // Before anything goes to the stream: what fails here leaves the step undone.
  if (repeats)
    if (const fut_status status = d->graph({step->rows, sampled}, &graph); status != FUT_OK) return status;
  if (const fut_status status = d->copy_input(*step, stream); status != FUT_OK) return status;
  if (!repeats) return d->launch(step->rows, step->head_rows, true, step->chunked != 0, sampled, stream);
  FUT_CHECK(cudaGraphLaunch(graph, stream));
  return FUT_OK;
}

fut_status fut_decoder_tokens(fut_decoder* d, int32_t* tokens, int32_t count, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  if (count < 0 || count > d->config.max_rows)
    return fail(FUT_INVALID, "%d tokens asked for, expected 0 to %d", count, d->config.max_rows);
  FUT_CHECK(cudaMemcpyAsync(d->chosen, d->place<int32_t>(d->at.tokens), count * sizeof(int32_t), cudaMemcpyDeviceToHost,
                            stream));
  FUT_CHECK(cudaStreamSynchronize(stream));
  std::memcpy(tokens, d->chosen, count * sizeof(int32_t));
  return FUT_OK;
}

const float* fut_decoder_logits(const fut_decoder* d) { return d->place<float>(d->at.logits); }

}  // extern "C"
