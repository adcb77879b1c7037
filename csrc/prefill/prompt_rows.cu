#include "../host/kernel_launch.h"
#include "../ptx/dependency.cuh"
#include "../ptx/pack.cuh"
#include "prompt_rows.h"
#include "quad.cuh"

namespace fut {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kVector = 8;  // BF16 elements of 16 bytes
constexpr float kE4m3Largest = 448.f;

// Raises a request's maximum and the site's counter by what a row's threads have seen; the whole block.
__device__ __forceinline__ void publish_row(const QuantizedOut& out, int request, float most, uint32_t saturated) {
  __shared__ uint32_t warp_most[kWarps], warp_saturated[kWarps];
  const uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(most));
  const uint32_t count = __reduce_add_sync(~0u, saturated);
  if (threadIdx.x % 32 == 0) {
    warp_most[threadIdx.x / 32] = bits;
    warp_saturated[threadIdx.x / 32] = count;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  uint32_t row_most = 0, row_saturated = 0;
  for (int i = 0; i < kWarps; ++i) {
    row_most = row_most > warp_most[i] ? row_most : warp_most[i];
    row_saturated += warp_saturated[i];
  }
  // Maxima only grow, so one that is not above what was read is not above what stands there.
  if (out.amax != nullptr && row_most > __ldcg(&out.amax[request])) atomicMax(&out.amax[request], row_most);
  if (out.saturated != nullptr && row_saturated != 0)
    atomicAdd(out.saturated, static_cast<unsigned long long>(row_saturated));
}

// A block a row, 16 bytes a thread at a time; 16 threads share a partial sum of squares.
__global__ void __launch_bounds__(kThreads) embed_prompts(const __grid_constant__ EmbedPromptsParams p) {
  static_assert(kSquareColumns == 16 * kVector, "half a warp holds the columns of a partial sum");
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x;
  const int vectors = p.hidden / kVector;
  const int square_parts = static_cast<int>(ceil_divide(p.hidden, kSquareColumns));
  const auto* from = reinterpret_cast<const uint4*>(p.embed) + int64_t{p.token[row]} * vectors;
  auto* to = reinterpret_cast<uint4*>(p.h) + row * vectors;
  const bool quantizes = p.quantized.data != nullptr;
  const int request = quantizes ? p.row_request[row] : 0;
  const float inverse = quantizes ? __frcp_rn(p.scale[request]) : 0.f;
  float most = 0.f;
  uint32_t saturated = 0;
  for (int first = 0; first < vectors; first += kThreads) {
    const int place = first + static_cast<int>(threadIdx.x);
    float squares = 0.f;
    if (place < vectors) {
      const uint4 raw = from[place];
      to[place] = raw;
      const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
      uint32_t e4m3[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = low_bf16(w[i]), high = high_bf16(w[i]);
        squares += low * low + high * high;
        most = max_with_nan(most, max_with_nan(fabsf(low), fabsf(high)));
        saturated += (fabsf(low * inverse) > kE4m3Largest) + (fabsf(high * inverse) > kE4m3Largest);
        e4m3[i / 2] |= pack_e4m3(low * inverse, high * inverse) << i % 2 * 16;
      }
      if (quantizes)
        reinterpret_cast<uint2*>(p.quantized.data + row * p.quantized.stride)[place] = make_uint2(e4m3[0], e4m3[1]);
    }
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) squares += __shfl_xor_sync(~0u, squares, distance);
    const int part = place / 16;
    if (threadIdx.x % 16 == 0 && part < square_parts) p.square_sums[row * square_parts + part] = squares;
  }
  if (quantizes) publish_row(p.quantized, request, most, saturated);
}

__global__ void __launch_bounds__(kThreads) normalize_rows(const __grid_constant__ NormalizeParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x;
  float sum = 0.f;
  for (int i = threadIdx.x % 32; i < p.square_parts; i += 32) sum += p.square_sums[row * p.square_parts + i];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  const float factor = rsqrtf(sum / static_cast<float>(p.hidden) + p.eps);
  const int vectors = p.hidden / kVector;
  for (int place = threadIdx.x; place < vectors; place += kThreads) {
    const uint4 raw = (reinterpret_cast<const uint4*>(p.h) + row * vectors)[place];
    uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 gain =
          p.gain == nullptr ? make_float2(1.f, 1.f) : reinterpret_cast<const float2*>(p.gain)[4 * place + i];
      w[i] = pack_bf16(low_bf16(w[i]) * factor * gain.x, high_bf16(w[i]) * factor * gain.y);
    }
    (reinterpret_cast<uint4*>(p.out) + row * vectors)[place] = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

__global__ void __launch_bounds__(kThreads) begin_scales(const __grid_constant__ ActivationState s) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int count = s.sites * s.requests;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
    s.run_scale[i] = s.scale[int64_t{i / s.requests} * s.states + s.state[i % s.requests]];
    s.run_amax[i] = 0;
  }
}

// A block a site.
__global__ void __launch_bounds__(kThreads) end_scales(const __grid_constant__ ActivationState s) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  uint32_t* const amax = s.amax + int64_t{blockIdx.x} * s.states;
  float* const scale = s.scale + int64_t{blockIdx.x} * s.states;
  for (int i = threadIdx.x; i < s.requests; i += kThreads)
    atomicMax(&amax[s.state[i]], s.run_amax[int64_t{blockIdx.x} * s.requests + i]);
  __syncthreads();
  for (int i = threadIdx.x; i < s.ended_count; i += kThreads) {
    const int state = s.ended[i];
    const uint32_t bits = __ldcg(&amax[state]);
    constexpr uint32_t kInfinity = 0x7f800000u;
    if (bits == 0 || bits >= kInfinity)
      atomicAdd(s.ignored, 1ull);
    else if (!s.frozen)
      scale[state] = __fdiv_rn(__fmul_rn(s.margin, __uint_as_float(bits)), kE4m3Largest);
    amax[state] = 0;
  }
}

}  // namespace

cudaError_t launch_embed_prompts(const EmbedPromptsParams& params, bool dependent, cudaStream_t stream) {
  const LaunchShape shape = {dim3(static_cast<unsigned>(params.rows)), kThreads, 0, 1, dependent};
  return launch_kernel(embed_prompts, shape, stream, params);
}

cudaError_t launch_normalize(const NormalizeParams& params, bool dependent, cudaStream_t stream) {
  const LaunchShape shape = {dim3(static_cast<unsigned>(params.rows)), kThreads, 0, 1, dependent};
  return launch_kernel(normalize_rows, shape, stream, params);
}

cudaError_t launch_begin_scales(const ActivationState& state, bool dependent, cudaStream_t stream) {
  const int64_t blocks = ceil_divide(int64_t{state.sites} * state.requests, kThreads);
  const LaunchShape shape = {dim3(static_cast<unsigned>(blocks < 128 ? blocks : 128)), kThreads, 0, 1, dependent};
  return launch_kernel(begin_scales, shape, stream, state);
}

cudaError_t launch_end_scales(const ActivationState& state, bool dependent, cudaStream_t stream) {
  const LaunchShape shape = {dim3(static_cast<unsigned>(state.sites)), kThreads, 0, 1, dependent};
  return launch_kernel(end_scales, shape, stream, state);
}

}  // namespace fut
