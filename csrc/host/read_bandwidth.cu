// fut_read_bandwidth: reads memory as fast as the card can, for the floor that a step is held against.

#include "../ptx/bulk_copy.cuh"
#include "error.h"

namespace fut {
namespace {

constexpr int kChunkBytes = 16 << 10;
constexpr int kStages = 8;  // 128 KB in flight an SM: more gained nothing
constexpr int kThreads = 256;

struct __align__(128) ReadShared {
  uint8_t ring[kStages][kChunkBytes];
  uint64_t full[kStages];
};

// One block an SM; each takes every gridDim.x-th chunk. The XOR of all words is what makes every byte be read.
__global__ __launch_bounds__(kThreads, 1) void read_kernel(const uint8_t* data, int64_t chunks, uint32_t* checksum) {
  extern __shared__ __align__(128) uint8_t dynamic_shared[];
  ReadShared& shared = *reinterpret_cast<ReadShared*>(dynamic_shared);
  const int64_t mine = (chunks - blockIdx.x + gridDim.x - 1) / gridDim.x;
  const auto fetch = [&](int64_t turn) {
    uint64_t* full = &shared.full[turn % kStages];
    barrier_expect(full, kChunkBytes);
    bulk_copy(shared.ring[turn % kStages], data + (blockIdx.x + turn * gridDim.x) * kChunkBytes, kChunkBytes, full,
              evict_first_policy());
  };
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) barrier_init(&shared.full[stage], 1);
    fence_barrier_init();
    for (int64_t turn = 0; turn < kStages && turn < mine; ++turn) fetch(turn);
  }
  __syncthreads();
  uint32_t bits = 0;
  for (int64_t turn = 0; turn < mine; ++turn) {
    barrier_wait(&shared.full[turn % kStages], static_cast<uint32_t>(turn / kStages & 1));
    const uint4* chunk = reinterpret_cast<const uint4*>(shared.ring[turn % kStages]);
#pragma unroll
    for (int i = 0; i < kChunkBytes / 16 / kThreads; ++i) {
      const uint4 words = chunk[threadIdx.x + i * kThreads];
      bits ^= words.x ^ words.y ^ words.z ^ words.w;
    }
    __syncthreads();
    if (threadIdx.x == 0 && turn + kStages < mine) fetch(turn + kStages);
  }
  bits = __reduce_xor_sync(~0u, bits);
  if (threadIdx.x % 32 == 0) atomicXor(checksum, bits);
}

}  // namespace
}  // namespace fut

extern "C" fut_status fut_read_bandwidth(const void* data, int64_t bytes, uint32_t* checksum, void* stream) {
  using namespace fut;
  if (data == nullptr || reinterpret_cast<uintptr_t>(data) % 16 != 0)
    return fail(FUT_INVALID, "fut_read_bandwidth: data must be a multiple of 16");
  if (checksum == nullptr) return fail(FUT_INVALID, "fut_read_bandwidth: checksum must not be null");
  if (bytes < kChunkBytes || bytes % kChunkBytes != 0)
    return fail(FUT_INVALID, "fut_read_bandwidth: %lld bytes, expected a multiple of %d", static_cast<long long>(bytes),
                kChunkBytes);
  int device = 0, multiprocessors = 0;
  FUT_CHECK(cudaGetDevice(&device));
  FUT_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  constexpr int kSharedBytes = sizeof(ReadShared);
  FUT_CHECK(cudaFuncSetAttribute(read_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const int64_t chunks = bytes / kChunkBytes;
  const int blocks = static_cast<int>(chunks < multiprocessors ? chunks : multiprocessors);
  read_kernel<<<blocks, kThreads, kSharedBytes, static_cast<cudaStream_t>(stream)>>>(static_cast<const uint8_t*>(data),
                                                                                     chunks, checksum);
  FUT_CHECK(cudaGetLastError());
  return FUT_OK;
}
