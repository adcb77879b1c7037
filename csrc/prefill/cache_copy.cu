// A CTA a page, KV head, and K or V. The bytes of a token lie scattered over its block of the cache, so a page whose
// tokens are all at hand is put together in shared memory and written in whole vectors; of others, token by token.

#include "../decode/kv_append.cuh"
#include "../host/error.h"
#include "../host/kernel_launch.h"
#include "../ptx/dependency.cuh"
#include "cache_copy.h"

namespace fut {

namespace {

constexpr int kWarps = 16;
constexpr int kWarpTokens = kPageTokens / kWarps;  // all fetched at once, for what they take is latency

struct CacheCopyParams {
  const __nv_bfloat16* history[2];  // K, V
  const int32_t* history_table;
  const int32_t* cache_table;
  const fut_page_span* spans;
  uint8_t* layer_pool;
  int64_t page_stride;
  int32_t history_width, cache_width, kv_heads;
  bool rotation, zero_point;
};

template <int kDim>
__device__ __forceinline__ HeadVector<kDim> history_head(const __nv_bfloat16* from, int lane) {
  HeadVector<kDim> head;
#pragma unroll
  for (int e = 0; e < HeadVector<kDim>::kPerLane; ++e)
    head.x[e] = HeadVector<kDim>::has(e, lane) ? __bfloat162float(__ldcg(from + lane + 32 * e)) : 0.f;
  return head;
}

template <int kDim, int kBits>
constexpr int kBlockBytes = kBits == 4 ? Int4Block<kDim>::kBytes : Bf16Block<kDim>::kBytes;

// Bytes `first` to `end` of a block.
struct Section {
  int first, end;
};

// What K (index 0) and V (1) take of a block.
template <int kDim, int kBits>
__device__ __forceinline__ Section elements_of(int which) {
  constexpr int kValues = kBits == 4 ? Int4Block<kDim>::kValues : Bf16Block<kDim>::kValues;
  constexpr int kEnd = kBits == 4 ? Int4Block<kDim>::kKeyScales : Bf16Block<kDim>::kBytes;
  return which == 0 ? Section{0, kValues} : Section{kValues, kEnd};
}

template <int kDim>
__device__ __forceinline__ Section scales_of(int which) {
  using Block = Int4Block<kDim>;
  return which == 0 ? Section{Block::kKeyScales, Block::kValueScales} : Section{Block::kValueScales, Block::kBytes};
}

__device__ __forceinline__ void store_section(uint8_t* to, const uint8_t* from, Section section) {
  for (int i = section.first + 16 * static_cast<int>(threadIdx.x); i < section.end; i += 16 * 32 * kWarps)
    *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
}

template <int kDim, int kBits>
__global__ void __launch_bounds__(32 * kWarps) copy_to_cache(const __grid_constant__ CacheCopyParams p) {
  extern __shared__ __align__(16) uint8_t whole_block[];
  __shared__ NewestToken<kDim> newest[kWarps];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv_head = blockIdx.y, which = blockIdx.z;
  const fut_page_span span = p.spans[blockIdx.x];
  const int64_t history_page = p.history_table[int64_t{span.slot} * p.history_width + span.page];
  const int64_t page = p.cache_table[int64_t{span.slot} * p.cache_width + span.page];
  uint8_t* const block = p.layer_pool + page * p.page_stride + int64_t{kv_head} * kBlockBytes<kDim, kBits>;
  const bool whole = span.count == kPageTokens;
  const int64_t head = (history_page * p.kv_heads + kv_head) * kPageTokens + span.first;
  HeadVector<kDim> x[kWarpTokens] = {};
#pragma unroll
  for (int i = 0; i < kWarpTokens; ++i) {
    const int token = warp + i * kWarps;
    if (token < span.count) x[i] = history_head<kDim>(p.history[which] + (head + token) * kDim, lane);
  }
#pragma unroll
  for (int i = 0; i < kWarpTokens; ++i) {
    const int token = warp + i * kWarps;
    if (token >= span.count) break;
    finish_newest<kDim, kBits>(newest[warp], which, x[i], p.rotation, p.zero_point, lane);
    store_newest<kDim, kBits>(whole ? whole_block : block, newest[warp], which, span.first + token, lane);
    __syncwarp();
  }
  if (!whole) return;
  __syncthreads();
  store_section(block, whole_block, elements_of<kDim, kBits>(which));
  if constexpr (kBits == 4) store_section(block, whole_block, scales_of<kDim>(which));
}

template <int kDim, int kBits>
cudaError_t launch(const CacheCopyParams& params, int count, bool dependent, cudaStream_t stream) {
  const cudaError_t shared = share_multiprocessor(copy_to_cache<kDim, kBits>);
  if (shared != cudaSuccess) return shared;
  const dim3 grid(static_cast<unsigned>(count), static_cast<unsigned>(params.kv_heads), 2);
  const LaunchShape shape = {grid, 32 * kWarps, kBlockBytes<kDim, kBits>, 1, dependent};
  return launch_kernel(copy_to_cache<kDim, kBits>, shape, stream, params);
}

template <int kDim>
cudaError_t launch_bits(const CacheCopyParams& params, const fut_cache_copy_call& call, bool dependent,
                        cudaStream_t stream) {
  return call.cache.bits == 4 ? launch<kDim, 4>(params, call.count, dependent, stream)
                              : launch<kDim, 16>(params, call.count, dependent, stream);
}

bool aligned(const void* pointer) { return pointer != nullptr && reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

cudaError_t launch_cache_copy(const fut_cache_copy_call& call, bool dependent, cudaStream_t stream) {
  const fut_kv_cache& cache = call.cache;
  const int64_t block = kv_block_bytes(cache.bits, cache.head_dim);
  CacheCopyParams p = {};
  p.history[0] = static_cast<const __nv_bfloat16*>(call.k);
  p.history[1] = static_cast<const __nv_bfloat16*>(call.v);
  p.history_table = call.history_table;
  p.cache_table = call.cache_table;
  p.spans = call.spans;
  p.layer_pool = static_cast<uint8_t*>(cache.pool) + int64_t{call.layer} * cache.kv_heads * block;
  p.page_stride = int64_t{cache.layers} * cache.kv_heads * block;
  p.history_width = call.history_width;
  p.cache_width = call.cache_width;
  p.kv_heads = cache.kv_heads;
  p.rotation = cache.rotation != 0;
  p.zero_point = cache.zero_point != 0;
  switch (cache.head_dim) {
    case 64:
      return launch_bits<64>(p, call, dependent, stream);
    case 80:
      return launch_bits<80>(p, call, dependent, stream);
    case 96:
      return launch_bits<96>(p, call, dependent, stream);
    case 128:
      return launch_bits<128>(p, call, dependent, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace fut

extern "C" fut_status fut_cache_copy(const fut_cache_copy_call* call, void* stream) {
  using namespace fut;
  const fut_kv_cache& c = call->cache;
  if (c.bits != 4 && c.bits != 16)
    return fail(FUT_INVALID, "fut_cache_copy: the cache has %d bits; 4 and 16 are known", c.bits);
  if (c.head_dim != 64 && c.head_dim != 80 && c.head_dim != 96 && c.head_dim != 128)
    return fail(FUT_INVALID, "fut_cache_copy: head_dim is %d; the kernels have 64, 80, 96 and 128", c.head_dim);
  if (c.kv_heads < 1 || call->layer < 0 || call->layer >= c.layers)
    return fail(FUT_INVALID, "fut_cache_copy: layer %d of %d with %d KV heads", call->layer, c.layers, c.kv_heads);
  if (call->count < 1 || call->history_width < 1 || call->cache_width < 1)
    return fail(FUT_INVALID, "fut_cache_copy: %d spans in page tables of %d and %d pages, expected at least 1 of each",
                call->count, call->history_width, call->cache_width);
  if (!aligned(c.pool) || call->k == nullptr || call->v == nullptr)
    return fail(FUT_INVALID, "fut_cache_copy: K, V and a pool aligned to 16 bytes are needed");
  if (call->history_table == nullptr || call->cache_table == nullptr || call->spans == nullptr)
    return fail(FUT_INVALID, "fut_cache_copy: page tables or spans are missing");
  return check_cuda(launch_cache_copy(*call, false, static_cast<cudaStream_t>(stream)), "fut_cache_copy");
}
