#include <algorithm>
#include <cmath>

#include "../host/error.h"
#include "../host/kernel_launch.h"
#include "attention.cuh"
#include "attention_kernel.cuh"

namespace fut {
namespace {

constexpr int kMaxGroup = 16;
// Two, so that one attends while the other prepares or merges. Where the work is short, the second ones end at once.
constexpr int kBlocksPerSm = 2;

struct Workspace {
  int64_t counters, sums, bytes;  // offsets; the pieces' outputs follow the sums
  int64_t out;

  Workspace(const fut_attention_shape& shape, int rows) {
    const int64_t heads = shape.heads;
    const int64_t parts = rows * heads * max_pieces(shape.max_context, shape.kv_heads);
    counters = 0;
    sums = align(kMaxRows * heads * 4);
    out = align(sums + parts * 8);
    bytes = align(out + parts * shape.head_dim * 4);
  }

  static int64_t align(int64_t bytes) { return (bytes + 255) / 256 * 256; }
};

AttentionParams parameters(const AttentionCall& call) {
  const fut_attention_shape& shape = call.shape;
  const fut_kv_cache& cache = call.cache;
  const int64_t block = kv_block_bytes(cache.bits, cache.head_dim);
  const Workspace workspace(shape, call.rows.rows);
  uint8_t* const base = static_cast<uint8_t*>(call.workspace);
  AttentionParams p{};
  p.qkv = call.qkv;
  p.q_norm = call.q_norm;
  p.k_norm = call.k_norm;
  p.rope_cos = shape.rope_cos;
  p.rope_sin = shape.rope_sin;
  p.layer_pool = static_cast<uint8_t*>(cache.pool) + int64_t{call.layer} * cache.kv_heads * block;
  p.page_stride = int64_t{cache.layers} * cache.kv_heads * block;
  p.position = call.rows.position;
  p.slot = call.rows.slot;
  p.page_table = call.rows.page_table;
  p.out = static_cast<__nv_bfloat16*>(call.out);
  p.arrived = reinterpret_cast<uint32_t*>(base + workspace.counters);
  p.piece_sums = reinterpret_cast<float2*>(base + workspace.sums);
  p.piece_out = reinterpret_cast<float*>(base + workspace.out);
  p.table_width = call.rows.table_width;
  p.rows = call.rows.rows;
  p.heads = shape.heads;
  p.kv_heads = shape.kv_heads;
  p.group = shape.heads / shape.kv_heads;
  p.max_pieces = max_pieces(shape.max_context, shape.kv_heads);
  p.eps = shape.rms_norm_eps;
  p.score_scale = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(shape.head_dim)));
  p.rotation = cache.rotation != 0;
  p.zero_point = cache.zero_point != 0;
  p.append = !call.chunked;
  p.cache_ready = call.dependent && call.cache_ready && !call.chunked;
  return p;
}

template <int kDim, int kBits, int kHeadTiles>
cudaError_t launch_traits(const AttentionCall& call, AttentionParams params, cudaStream_t stream) {
  using Traits = AttentionTraits<kDim, kBits, kHeadTiles>;
  int device = 0;
  int sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  using Layout = SharedLayout<Traits>;
  const int most_slots = (kNarrowShared - Layout::ring(params.group)) / Traits::kSlotBytes;
  while (params.ring_shift < kMostRingShift && 2 << params.ring_shift <= most_slots) ++params.ring_shift;
  if (1 << params.ring_shift < Traits::kSlotStep) return cudaErrorInvalidConfiguration;
  error = cudaFuncSetAttribute(attend_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, kNarrowShared);
  if (error != cudaSuccess) return error;
  error = share_multiprocessor(attend_kernel<Traits>);
  if (error != cudaSuccess) return error;
  bool dependent = call.dependent;
  if (call.chunked) {
    error = share_multiprocessor(append_kernel<kDim, kBits>);
    if (error != cudaSuccess) return error;
    const LaunchShape shape = {dim3(params.rows * params.kv_heads), 64, 0, 1, dependent};
    error = launch_kernel(append_kernel<kDim, kBits>, shape, stream, params);
    if (error != cudaSuccess) return error;
    dependent = true;
  }
  const int64_t items = int64_t{params.rows} * params.kv_heads * params.max_pieces;
  const int grid = static_cast<int>(std::min<int64_t>(int64_t{kBlocksPerSm} * sms, items));
  // All of it, whatever the ring takes: see kernel_launch.h.
  const LaunchShape shape = {dim3(grid), Traits::kThreads, kNarrowShared, 1, dependent};
  return launch_kernel(attend_kernel<Traits>, shape, stream, params);
}

template <int kDim>
cudaError_t launch_dim(const AttentionCall& call, const AttentionParams& params, cudaStream_t stream) {
  const bool int4 = call.cache.bits == 4;
  if (params.group <= 8) {
    return int4 ? launch_traits<kDim, 4, 1>(call, params, stream) : launch_traits<kDim, 16, 1>(call, params, stream);
  }
  return int4 ? launch_traits<kDim, 4, 2>(call, params, stream) : launch_traits<kDim, 16, 2>(call, params, stream);
}

bool aligned(const void* pointer, uintptr_t bytes) {
  return pointer != nullptr && reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

}  // namespace

int64_t attention_workspace_bytes(const fut_attention_shape& shape, int max_rows) {
  return Workspace(shape, max_rows).bytes;
}

cudaError_t launch_attention(const AttentionCall& call, cudaStream_t stream) {
  const AttentionParams params = parameters(call);
  switch (call.shape.head_dim) {
    case 64:
      return launch_dim<64>(call, params, stream);
    case 80:
      return launch_dim<80>(call, params, stream);
    case 96:
      return launch_dim<96>(call, params, stream);
    case 128:
      return launch_dim<128>(call, params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

namespace {

fut_status check_shape(const fut_attention_shape& s) {
  if (s.head_dim != 64 && s.head_dim != 80 && s.head_dim != 96 && s.head_dim != 128) {
    return fail(FUT_INVALID, "head_dim is %d; the kernels have 64, 80, 96 and 128", s.head_dim);
  }
  if (s.kv_heads < 1 || s.heads < s.kv_heads || s.heads % s.kv_heads != 0 || s.heads / s.kv_heads > kMaxGroup) {
    return fail(FUT_INVALID, "%d heads share %d KV heads; from 1 to %d must share one", s.heads, s.kv_heads, kMaxGroup);
  }
  if (s.max_context < 1) return fail(FUT_INVALID, "max_context is %d", s.max_context);
  if (!aligned(s.rope_cos, 16) || !aligned(s.rope_sin, 16)) {
    return fail(FUT_INVALID, "rope_cos and rope_sin must be tables aligned to 16 bytes");
  }
  return FUT_OK;
}

fut_status check_cache(const fut_kv_cache& c, const fut_attention_shape& s, int layer) {
  if (c.bits != 4 && c.bits != 16) return fail(FUT_INVALID, "the cache has %d bits; 4 and 16 are known", c.bits);
  if (c.head_dim != s.head_dim || c.kv_heads != s.kv_heads) {
    return fail(FUT_INVALID, "the cache is for %d KV heads of %d, attention has %d of %d", c.kv_heads, c.head_dim,
                s.kv_heads, s.head_dim);
  }
  if (layer < 0 || layer >= c.layers) return fail(FUT_INVALID, "layer %d of a cache of %d", layer, c.layers);
  if (!aligned(c.pool, 16)) return fail(FUT_INVALID, "the cache pool must be aligned to 16 bytes");
  return FUT_OK;
}

}  // namespace

fut_status check_attention(const AttentionCall& call, int64_t workspace_bytes) {
  fut_status status = check_shape(call.shape);
  if (status == FUT_OK) status = check_cache(call.cache, call.shape, call.layer);
  if (status != FUT_OK) return status;
  const fut_rows& rows = call.rows;
  if (rows.rows < 1 || rows.rows > kMaxRows) return fail(FUT_INVALID, "%d rows; from 1 to %d", rows.rows, kMaxRows);
  if (rows.position == nullptr || rows.slot == nullptr || rows.page_table == nullptr || rows.table_width < 1) {
    return fail(FUT_INVALID, "rows need position, slot and a page table of at least one page");
  }
  if ((call.q_norm == nullptr) != (call.k_norm == nullptr)) {
    return fail(FUT_INVALID, "q_norm and k_norm come together or not at all");
  }
  if (!aligned(call.qkv, 16) || !aligned(call.out, 2)) {
    return fail(FUT_INVALID, "qkv must be aligned to 16 bytes, out to 2");
  }
  const int64_t needed = attention_workspace_bytes(call.shape, rows.rows);
  if (!aligned(call.workspace, 256) || workspace_bytes < needed) {
    return fail(FUT_INVALID, "the workspace has %lld bytes; %lld are needed, aligned to 256",
                static_cast<long long>(workspace_bytes), static_cast<long long>(needed));
  }
  return FUT_OK;
}

}  // namespace fut

extern "C" {

int64_t fut_kv_block_bytes(int32_t bits, int32_t head_dim) { return fut::kv_block_bytes(bits, head_dim); }

int64_t fut_attention_workspace_bytes(const fut_attention_shape* shape, int32_t max_rows) {
  return fut::attention_workspace_bytes(*shape, max_rows);
}

fut_status fut_attention(const fut_attention_shape* shape, const fut_kv_cache* cache, int32_t layer,
                         const fut_rows* rows, int32_t chunked, const float* qkv, const float* q_norm,
                         const float* k_norm, void* out, void* workspace, int64_t workspace_bytes, void* stream) {
  fut::AttentionCall call{*shape, *cache, layer,     *rows,        qkv,   q_norm,
                          k_norm, out,    workspace, chunked != 0, false, false};
  const fut_status status = fut::check_attention(call, workspace_bytes);
  if (status != FUT_OK) return status;
  return fut::check_cuda(fut::launch_attention(call, static_cast<cudaStream_t>(stream)), "attention");
}

}  // extern "C"
