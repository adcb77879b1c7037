#include <cuda_bf16.h>

#include "../host/kernel_launch.h"
#include "../ptx/dependency.cuh"
#include "embed.h"

namespace fut {

namespace {

constexpr int kThreads = 128;

// A warp takes 32 columns at a time: two partial sums.
__global__ void __launch_bounds__(kThreads)
    embed_rows(const __nv_bfloat16* embed, const int32_t* token, __nv_bfloat16* h, float* square_sums, int hidden) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = blockIdx.y, lane = threadIdx.x & 31;
  const int column = blockIdx.x * kThreads + threadIdx.x;
  const __nv_bfloat16* from = embed + static_cast<int64_t>(token[row]) * hidden;
  float square = 0.f;
  if (column < hidden) {
    const __nv_bfloat16 value = from[column];
    h[static_cast<int64_t>(row) * hidden + column] = value;
    square = __bfloat162float(value) * __bfloat162float(value);
  }
#pragma unroll
  for (int distance = 8; distance; distance >>= 1) square += __shfl_xor_sync(0xffffffffu, square, distance);
  if ((lane & 15) == 0 && column < hidden)
    square_sums[static_cast<int64_t>(row) * ((hidden + 15) / 16) + column / 16] = square;
}

}  // namespace

cudaError_t launch_embed(const void* embed, const int32_t* token, void* h, float* square_sums, int rows, int hidden,
                         cudaStream_t stream) {
  const cudaError_t shared = share_multiprocessor(embed_rows);
  if (shared != cudaSuccess) return shared;
  const dim3 grid((hidden + kThreads - 1) / kThreads, rows);
  embed_rows<<<grid, kThreads, 0, stream>>>(static_cast<const __nv_bfloat16*>(embed), token,
                                            static_cast<__nv_bfloat16*>(h), square_sums, hidden);
  return cudaGetLastError();
}

}  // namespace fut
