// y = W x for 1 to 32 tokens: decode's matrix products, fed by a ring of bulk copies.
//
// The weights stand on the A operand of mma.sync.m16n8k16 (16 output rows), the tokens on its 8 columns. K is always
// summed in kSlices slices, each in the order of its groups, and the slices in the order of their numbers, so that a
// token's result does not depend on how many tokens share the launch or how the work is spread over the card.
//
// A cluster of C CTAs takes the same rows and shares K out: each CTA holds the activations of kSlices / C slices in
// shared memory and works on C groups of rows at once, a warp a slice and group. Every warp has its own ring of weights
// in shared memory, which it fills by itself: no two warps wait for each other before a window of rows is complete.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../fut.h"
#include "../ptx/bulk_copy.cuh"
#include "../ptx/dependency.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/thread.cuh"
#include "activation_stage.cuh"
#include "projection_params.cuh"

namespace fut {

// ---------------------------------------------------------------- weights: a warp's ring

// What one warp reads: a slice of K of `kRowTiles` neighbouring row tiles in every round. Addresses are kept and moved,
// never computed anew: this runs once a chunk on one lane while the others wait.
template <int kFormat, int kGroup, int kRowTiles>
struct WeightStream {
  static constexpr int kColumnBytes = kFormat == FUT_INT4 ? kTileRows / 2 : kFormat == FUT_BF16 ? 2 : 1;
  static constexpr int kStageBytes = stage_bytes(kFormat, kGroup, kRowTiles);

  const ProjectionParams& p;
  uint8_t* ring;
  uint64_t* full;
  const uint8_t* next;        // INT4: codes of the next chunk; else: this lane's row of it
  const uint8_t* next_scale;  // INT4
  int tile, end_tile, tiles_a_round;
  int columns, left;  // of the slice, and what is not fetched of it
  int stage = 0;
  int lane;

  __device__ __forceinline__ WeightStream(const ProjectionParams& params, uint8_t* warp_ring, uint64_t* warp_full,
                                          int first, int end, int round, int begin, int width, int lane_of_warp)
      : p(params),
        ring(warp_ring),
        full(warp_full),
        tile(first),
        end_tile(width > 0 ? end : 0),
        tiles_a_round(round),
        columns(width),
        left(width),
        lane(lane_of_warp) {
    next = p.weight + first * tile_stride() + begin * kColumnBytes;
    if constexpr (kFormat == FUT_INT4)
      next_scale = p.scale + first * scale_stride() + begin / kGroup * (kTileRows * 2);
    else
      next += static_cast<int64_t>(lane & 15) * p.stored_cols * kColumnBytes;
  }

  // Bytes from a row tile to the next.
  __device__ __forceinline__ int64_t tile_stride() const {
    return static_cast<int64_t>(p.stored_cols) * (kFormat == FUT_INT4 ? kColumnBytes : kTileRows * kColumnBytes);
  }
  __device__ __forceinline__ int64_t scale_stride() const {
    return static_cast<int64_t>(p.stored_cols / kGroup) * (kTileRows * 2);
  }

  __device__ __forceinline__ bool more() const { return tile < end_tile; }

  // Starts the copy of the next chunk into the next stage, which must be free.
  __device__ __forceinline__ void fetch() {
    const int width = min(chunk_cols(kFormat, kRowTiles), left);
    const int tiles = min(kRowTiles, end_tile - tile);
    uint8_t* to = ring + stage * kStageBytes;
    uint64_t* barrier = full + stage;
    const uint64_t policy = evict_first_policy();
    if constexpr (kFormat == FUT_INT4) {
      if (lane == 0) {
        const uint32_t code_bytes = width * kColumnBytes;
        const uint32_t scale_bytes = width / kGroup * (kTileRows * 2);
        barrier_expect(barrier, tiles * (code_bytes + scale_bytes));
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
          if (r < tiles) {
            uint8_t* place = to + r * int4_tile_stage(kGroup, kRowTiles);
            bulk_copy(place, next + r * tile_stride(), code_bytes, barrier, policy);
            bulk_copy(place + int4_tile_codes(kRowTiles), next_scale + r * scale_stride(), scale_bytes, barrier,
                      policy);
          }
      }
      next_scale += width / kGroup * (kTileRows * 2);
    } else {
      const uint32_t row_bytes = width * kColumnBytes;
      if (lane == 0) barrier_expect(barrier, tiles * kTileRows * row_bytes);
      __syncwarp();
      if (lane < kTileRows)
        for (int r = 0; r < tiles; ++r)
          bulk_copy(to + (r * kTileRows + lane) * kRowPitch, next + r * tile_stride(), row_bytes, barrier, policy);
    }
    next += width * kColumnBytes;
    left -= width;
    if (++stage == p.stages) stage = 0;
    if (left == 0) {
      next += tiles_a_round * tile_stride() - columns * kColumnBytes;
      if constexpr (kFormat == FUT_INT4)
        next_scale += tiles_a_round * scale_stride() - columns / kGroup * (kTileRows * 2);
      tile += tiles_a_round;
      left = columns;
    }
  }
};

// ---------------------------------------------------------------- arithmetic: one chunk

template <int kTokenTiles>
using Accumulator = float[kTokenTiles][4];

// Takes what the offsets of the codes add out of a group's products, scales them and adds them to the slice's sum.
template <int kTokenTiles, int kRowTiles>
__device__ __forceinline__ void finish_group(const uint8_t* scales, int tile_stage, int scale_is_fp16,
                                             const float* corrections, Accumulator<kTokenTiles> (&group)[kRowTiles],
                                             Accumulator<kTokenTiles> (&sum)[kRowTiles]) {
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    const uint32_t stored = *reinterpret_cast<const uint32_t*>(scales + r * tile_stage);
    const float2 scale = scale_is_fp16
                             ? __half22float2(*reinterpret_cast<const __half2*>(&stored))
                             : make_float2(__uint_as_float(stored << 16), __uint_as_float(stored & 0xffff0000u));
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) {
      const float2 c = *reinterpret_cast<const float2*>(corrections + 8 * j);
      sum[r][j][0] = fmaf(scale.x, group[r][j][0] - c.x, sum[r][j][0]);
      sum[r][j][1] = fmaf(scale.x, group[r][j][1] - c.y, sum[r][j][1]);
      sum[r][j][2] = fmaf(scale.y, group[r][j][2] - c.x, sum[r][j][2]);
      sum[r][j][3] = fmaf(scale.y, group[r][j][3] - c.y, sum[r][j][3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) group[r][j][i] = 0.f;
    }
  }
}

// `kTiles` neighbouring k64 tiles of INT4, whole groups: codes as FP16 1024 + q and 1024 + 16 q go into two
// accumulators.
template <int kGroup, int kTiles, int kTokenTiles, int kRowTiles>
__device__ __forceinline__ void multiply_tiles(const uint8_t* codes, const uint8_t* scales, int scale_is_fp16,
                                               const uint8_t* x, const int (&x_row)[kTokenTiles],
                                               const float* corrections, int lane,
                                               Accumulator<kTokenTiles> (&sum)[kRowTiles]) {
  constexpr int kStage = int4_tile_stage(kGroup, kRowTiles);
  Accumulator<kTokenTiles> products[kRowTiles] = {};
#pragma unroll(kTokenTiles == 4 && kGroup >= kTiles * kTileCols ? 1 : kTiles)
  for (int tile = 0; tile < kTiles; ++tile) {
    uint4 words[kRowTiles];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
      words[r] = *reinterpret_cast<const uint4*>(codes + r * kStage + tile * (kTileRows * 32) + lane * 16);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint4 b[kTokenTiles];
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j)
        b[j] = *reinterpret_cast<const uint4*>(x + x_row[j] + 128 * tile + 64 * pair);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        const uint32_t first = pair == 0 ? words[r].x : words[r].z, second = pair == 0 ? words[r].y : words[r].w;
        const uint32_t low = first >> kPairShift, high = second >> kPairShift;
        const uint32_t e0 = pick_bits<kPairMaskEven, kFp16Magic>(first), e1 = pick_bits<kPairMaskEven, kFp16Magic>(low);
        const uint32_t e2 = pick_bits<kPairMaskEven, kFp16Magic>(second),
                       e3 = pick_bits<kPairMaskEven, kFp16Magic>(high);
        const uint32_t o0 = pick_bits<kPairMaskOdd, kFp16Magic>(first), o1 = pick_bits<kPairMaskOdd, kFp16Magic>(low);
        const uint32_t o2 = pick_bits<kPairMaskOdd, kFp16Magic>(second), o3 = pick_bits<kPairMaskOdd, kFp16Magic>(high);
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) {
          mma_fp16(products[r][j], e0, e1, e2, e3, b[j].x, b[j].y);
          mma_fp16(products[r][j], o0, o1, o2, o3, b[j].z, b[j].w);
        }
      }
      if ((64 * tile + 32 * pair + 32) % kGroup == 0) {
        const int group = (64 * tile + 32 * pair) / kGroup;
        finish_group<kTokenTiles, kRowTiles>(scales + group * (kTileRows * 2), kStage, scale_is_fp16,
                                             corrections + group * (8 * kTokenTiles), products, sum);
      }
    }
  }
}

// A chunk of INT4, `width` columns from `column` of this block's activations on.
template <int kGroup, int kTokenTiles, int kRowTiles>
__device__ __forceinline__ void multiply_int4(const uint8_t* stage, int scale_is_fp16, const uint8_t* x,
                                              const int (&x_row)[kTokenTiles], const float* corrections, int column,
                                              int width, int lane, Accumulator<kTokenTiles> (&sum)[kRowTiles]) {
  // More tiles at once give the scheduler more to overlap, fewer leave registers for more tokens.
  constexpr int kUnit = kGroup > kTileCols ? kGroup / kTileCols : 1;
  constexpr int kTiles = kTokenTiles == 1 ? 2 * kUnit : kUnit;
  const uint8_t* scales = stage + int4_tile_codes(kRowTiles) + 4 * (lane >> 2);
  x += 2 * column + 16 * (lane & 3);
  corrections += column / kGroup * (8 * kTokenTiles) + 2 * (lane & 3);
  int done = 0;
  for (; done + kTiles * kTileCols <= width; done += kTiles * kTileCols)
    multiply_tiles<kGroup, kTiles, kTokenTiles, kRowTiles>(
        stage + done * (kTileRows / 2), scales + done / kGroup * (kTileRows * 2), scale_is_fp16, x + 2 * done, x_row,
        corrections + done / kGroup * (8 * kTokenTiles), lane, sum);
  if constexpr (kTiles > kUnit) {
#pragma unroll 1
    for (; done < width; done += kUnit * kTileCols)
      multiply_tiles<kGroup, kUnit, kTokenTiles, kRowTiles>(
          stage + done * (kTileRows / 2), scales + done / kGroup * (kTileRows * 2), scale_is_fp16, x + 2 * done, x_row,
          corrections + done / kGroup * (8 * kTokenTiles), lane, sum);
  }
}

// A chunk of E4M3 or BF16. A lane's 16 bytes of a row are neighbouring columns: the same permutation of K on both
// operands (activation_stage.cuh) leaves the product what it was.
template <int kFormat, int kTokenTiles, int kRowTiles>
__device__ __forceinline__ void multiply_rows(const uint8_t* stage, const uint8_t* x, const int (&x_row)[kTokenTiles],
                                              int column, int width, int lane,
                                              Accumulator<kTokenTiles> (&sum)[kRowTiles]) {
  constexpr int kBlock = kFormat == FUT_BF16 ? 32 : 64;  // columns of one 16-byte load of each of a row's four lanes
  const int g = lane >> 2, t = lane & 3;
  for (int block = 0; block * kBlock < width; ++block) {
    const int have = width - block * kBlock - t * (kBlock / 4);  // columns that exist from this lane's first on
#pragma unroll
    for (int part = 0; part < kBlock / 32; ++part) {
      uint4 b[kTokenTiles];
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j)
        b[j] = *reinterpret_cast<const uint4*>(x + x_row[j] + 2 * (column + block * kBlock + 32 * part) + 16 * t);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        const uint8_t* row = stage + (r * kTileRows + g) * kRowPitch + block * 64 + 16 * t;
        if constexpr (kFormat == FUT_BF16) {
          // What lies past the matrix is whatever the stage held before.
          uint4 low = make_uint4(0, 0, 0, 0), high = low;
          if (have > 0) {
            low = *reinterpret_cast<const uint4*>(row);
            high = *reinterpret_cast<const uint4*>(row + 8 * kRowPitch);
          }
#pragma unroll
          for (int j = 0; j < kTokenTiles; ++j) {
            mma_bf16(sum[r][j], low.x, high.x, low.y, high.y, b[j].x, b[j].y);
            mma_bf16(sum[r][j], low.z, high.z, low.w, high.w, b[j].z, b[j].w);
          }
        } else {
          uint2 low = make_uint2(0, 0), high = low;
          if (have > 0) {
            low = *reinterpret_cast<const uint2*>(row + 8 * part);
            high = *reinterpret_cast<const uint2*>(row + 8 * kRowPitch + 8 * part);
          }
          const uint32_t a[8] = {e4m3x2_to_fp16x2(low.x & 0xffff), e4m3x2_to_fp16x2(high.x & 0xffff),
                                 e4m3x2_to_fp16x2(low.x >> 16),    e4m3x2_to_fp16x2(high.x >> 16),
                                 e4m3x2_to_fp16x2(low.y & 0xffff), e4m3x2_to_fp16x2(high.y & 0xffff),
                                 e4m3x2_to_fp16x2(low.y >> 16),    e4m3x2_to_fp16x2(high.y >> 16)};
#pragma unroll
          for (int j = 0; j < kTokenTiles; ++j) {
            mma_fp16(sum[r][j], a[0], a[1], a[2], a[3], b[j].x, b[j].y);
            mma_fp16(sum[r][j], a[4], a[5], a[6], a[7], b[j].z, b[j].w);
          }
        }
      }
    }
  }
}

// ---------------------------------------------------------------- epilogue

__device__ __forceinline__ float silu(float v) { return v / (1.f + expf(-v)); }

// Rows `g` and `g + 8` of a row tile for two neighbouring tokens: the order of an MMA's accumulator in a lane.
struct Quad {
  int tile, row, token;  // row g
  float value[4];        // (g, token), (g, token + 1), (g + 8, token), (g + 8, token + 1)
};

__device__ __forceinline__ bool exists(const ProjectionParams& p, const Quad& quad, int i) {
  return quad.token + (i & 1) < p.tokens && quad.row + 4 * (i & 2) < p.rows;
}

__device__ __forceinline__ int64_t y_index(const ProjectionParams& p, const Quad& quad, int i) {
  return static_cast<int64_t>(quad.token + (i & 1)) * p.rows + quad.row + 4 * (i & 2);
}

__device__ __forceinline__ void store_residual(const ProjectionParams& p, const Quad& quad, const float (&before)[4],
                                               int lane) {
  __nv_bfloat16* h = static_cast<__nv_bfloat16*>(p.y);
  float squares[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (!exists(p, quad, i)) continue;
    const __nv_bfloat16 rounded = __float2bfloat16(before[i] + quad.value[i]);
    h[y_index(p, quad, i)] = rounded;
    squares[i & 1] += __bfloat162float(rounded) * __bfloat162float(rounded);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
      squares[i] += __shfl_xor_sync(0xffffffffu, squares[i], distance);
    if (lane < 4 && quad.token + i < p.tokens)
      p.y_square_sums[static_cast<int64_t>(quad.token + i) * p.tiles + quad.tile] = squares[i];
  }
}

__device__ __forceinline__ void store_swiglu(const ProjectionParams& p, const Quad& quad, int lane) {
  const int channels = p.rows / 2;
  __nv_bfloat16* y = static_cast<__nv_bfloat16*>(p.y) + static_cast<int64_t>(quad.token) * channels;
  if (p.row_order == FUT_INTERLEAVE8) {
    const int channel = quad.tile * 8 + (lane >> 2);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (channel < channels && quad.token + i < p.tokens)
        y[static_cast<int64_t>(i) * channels + channel] = __float2bfloat16(silu(quad.value[i]) * quad.value[i + 2]);
  } else {
    // Even rows are gates; their ups stand four lanes further.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float up = __shfl_down_sync(0xffffffffu, quad.value[i], 4);
      if ((lane & 4) == 0 && exists(p, quad, i))
        y[static_cast<int64_t>(i & 1) * channels + (quad.row + 4 * (i & 2)) / 2] =
            __float2bfloat16(silu(quad.value[i]) * up);
    }
  }
}

// Finishes the rows of one round: sums the slices in their order and stores. One warp; `slot` holds the partial sums.
template <int kTokenTiles, int kRowTiles>
__device__ __forceinline__ void finish_round(const ProjectionParams& p, const float* slot, uint64_t* full,
                                             uint32_t parity, int first_tile, int tiles, int lane) {
  constexpr int kQuads = kTokenTiles * kRowTiles;
  constexpr bool kAhead = kQuads <= 2;  // the residual is loaded while the sums are awaited
  const auto quad_of = [&](int q) {
    const int tile = first_tile + q / kTokenTiles;
    return Quad{tile, tile * kTileRows + (lane >> 2), q % kTokenTiles * 8 + 2 * (lane & 3), {0.f, 0.f, 0.f, 0.f}};
  };
  float before[kAhead ? kQuads : 1][4];
  const auto load_residual = [&](int q, float (&to)[4]) {
    const Quad quad = quad_of(q);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      to[i] = exists(p, quad, i) ? __bfloat162float(static_cast<const __nv_bfloat16*>(p.y)[y_index(p, quad, i)]) : 0.f;
  };
  if (kAhead && p.epilogue == FUT_RESIDUAL) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) load_residual(q, before[kAhead ? q : 0]);
  }
  barrier_wait(full, parity);
#pragma unroll(kAhead ? kQuads : 1)
  for (int q = 0; q < kQuads; ++q) {
    if (q / kTokenTiles >= tiles) break;
    Quad quad = quad_of(q);
    if (!kAhead && p.epilogue == FUT_RESIDUAL) load_residual(q, before[0]);
    const float* from = slot + q * kLanes * 4 + lane * 4;
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      const float4 part = *reinterpret_cast<const float4*>(from + s * kQuads * kLanes * 4);
      quad.value[0] += part.x;
      quad.value[1] += part.y;
      quad.value[2] += part.z;
      quad.value[3] += part.w;
    }
    if (p.channel_scale != nullptr) {
      const float low = p.channel_scale[quad.row], high = p.channel_scale[quad.row + 8];
      quad.value[0] *= low, quad.value[1] *= low, quad.value[2] *= high, quad.value[3] *= high;
    }
    if (p.bias != nullptr) {
      const float low = quad.row < p.rows ? p.bias[quad.row] : 0.f,
                  high = quad.row + 8 < p.rows ? p.bias[quad.row + 8] : 0.f;
      quad.value[0] += low, quad.value[1] += low, quad.value[2] += high, quad.value[3] += high;
    }
    if (p.epilogue == FUT_STORE) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (exists(p, quad, i)) static_cast<float*>(p.y)[y_index(p, quad, i)] = quad.value[i];
    } else if (p.epilogue == FUT_RESIDUAL) {
      store_residual(p, quad, before[kAhead ? q : 0], lane);
    } else {
      store_swiglu(p, quad, lane);
    }
  }
}

// ---------------------------------------------------------------- kernel

template <int kFormat, int kGroup, int kTokenTiles, int kRowTiles>
__global__ void __launch_bounds__(kProjectionThreads, kTokenTiles == 1 ? 2 : 1) project(const ProjectionParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int cluster = p.cluster, local_slices = kSlices / cluster;
  const int rank = blockIdx.x % cluster, cluster_id = blockIdx.x / cluster, clusters = gridDim.x / cluster;
  const ProjectionLayout at(p, kFormat, kGroup, kTokenTiles, kRowTiles);
  uint64_t* barriers = reinterpret_cast<uint64_t*>(shared + at.barriers);
  uint64_t* slot_full = barriers + kProjectionWarps * p.stages;
  uint64_t* slot_free = slot_full + p.slots;  // [slot][CTA of the cluster that finishes the rows]
  float* partial = reinterpret_cast<float*>(shared + at.partial);
  const int first = static_cast<int>(static_cast<int64_t>(p.tiles) * cluster_id / clusters);
  const int end = static_cast<int>(static_cast<int64_t>(p.tiles) * (cluster_id + 1) / clusters);
  const int tiles_a_round = cluster * kRowTiles;

  if (threadIdx.x == 0) {
    for (int s = 0; s < p.slots; ++s) {
      barrier_init(slot_full + s, cluster == 1 ? kSlices : 1);
      for (int c = 0; c < cluster; ++c) barrier_init(slot_free + s * cluster + c, 1);
    }
    for (int s = 0; s < kProjectionWarps * p.stages; ++s) barrier_init(barriers + s, 1);
    fence_barrier_init();
  }
  if (cluster == 1)
    __syncthreads();
  else
    cluster_sync_relaxed();

  if (warp == kProjectionWarps) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    // In every round this CTA finishes the row tiles of one group, whose eight slices come from all CTAs of the
    // cluster.
    const int row_tile_bytes = kSlices * ((p.tokens + 1) / 2) * 8 * 16;  // what the lanes with tokens send
    const auto expect = [&](int tile, int slot) {
      if (cluster > 1 && lane == 0 && tile < end)
        barrier_expect(slot_full + slot, min(kRowTiles, end - tile) * row_tile_bytes);
    };
    int tile = first + rank * kRowTiles;
    for (int s = 0; s < p.slots; ++s) expect(tile + s * tiles_a_round, s);
    int slot = 0, parity = 0;
    for (; tile < end; tile += tiles_a_round) {
      finish_round<kTokenTiles, kRowTiles>(p, partial + slot * at.slot_floats, slot_full + slot, parity, tile,
                                           min(kRowTiles, end - tile), lane);
      __syncwarp();
      // Only who will wait is told: nothing may reach a CTA that has left.
      const int next = tile + p.slots * tiles_a_round;
      if (next < end) {
        expect(next, slot);
        __syncwarp();
        if (lane < cluster) cluster_arrive(cluster_address(slot_free + slot * cluster + rank, lane));
      }
      if (++slot == p.slots) {
        slot = 0;
        parity ^= 1;
      }
    }
  } else {
    // Weights depend on nothing: they may come while the kernel before still runs.
    const int local_slice = warp % local_slices, row_group = warp / local_slices;
    const int slice = rank * local_slices + local_slice;
    const int x_begin = p.slice_begin(rank * local_slices);
    const int k_begin = p.slice_begin(slice), offset = k_begin - x_begin, x_end = p.slice_begin(slice + 1),
              k_end = min(x_end, p.stored_cols);
    uint64_t* full = barriers + warp * p.stages;
    WeightStream<kFormat, kGroup, kRowTiles> stream(
        p, shared + at.ring + warp * p.stages * stage_bytes(kFormat, kGroup, kRowTiles), full,
        first + row_group * kRowTiles, end, tiles_a_round, k_begin, k_end - k_begin, lane);
    for (int s = 0; s < p.stages && stream.more(); ++s) stream.fetch();
    const int chunks = (x_end - k_begin) / 8;
    fetch_gains(p, k_begin, chunks, lane);
    let_next_kernel_start();
    wait_for_previous_kernel();

    uint8_t* x = shared + at.x;
    float* corrections = reinterpret_cast<float*>(shared + at.corrections);
    float* factors = reinterpret_cast<float*>(shared + at.factors) + local_slice * kMostTokens;
    float* row_factors = reinterpret_cast<float*>(shared + at.row_factors);
    for (int token = row_group; token < p.tokens; token += cluster)
      fetch_activations(p, token, k_begin, chunks, x + token * at.x_pitch + 2 * offset, lane);
    if (p.square_sums != nullptr) {
      reduce_row_factors(p, row_factors, warp, lane);
      named_barrier<32 * kProjectionWarps>(1);
    }
    cp_async_wait();
    __syncwarp();
    convert_slice<kFormat, kGroup, kTokenTiles>(p,
                                                {x + 2 * offset, corrections + offset / kGroup * (8 * kTokenTiles),
                                                 factors, row_factors, at.x_pitch, k_begin, chunks, row_group, cluster},
                                                lane);
    if (cluster == 1)
      __syncwarp();
    else
      named_barrier<32 * kProjectionWarps>(1);

    // Read anew: nothing that follows from it is kept while the activations are converted.
    const int lane = static_cast<int>(thread_read_anew() & 31), g = lane >> 2, t = lane & 3;
    int x_row[kTokenTiles];
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) x_row[j] = (8 * j + g < p.tokens ? 8 * j + g : 0) * at.x_pitch;
    const int slice_floats = (slice * kRowTiles * kTokenTiles * kLanes + lane) * 4;
    const auto their_slots = cluster_address(partial, row_group), their_full = cluster_address(slot_full, row_group);
    int stage = 0, parity = 0, slot = 0, slot_parity = 1;
    for (int tile = first + row_group * kRowTiles; tile < end; tile += tiles_a_round) {
      Accumulator<kTokenTiles> sum[kRowTiles] = {};
      for (int done = 0; done < stream.columns; done += chunk_cols(kFormat, kRowTiles)) {
        barrier_wait(full + stage, parity);
        const int width = min(chunk_cols(kFormat, kRowTiles), stream.columns - done);
        const uint8_t* data = stream.ring + stage * stage_bytes(kFormat, kGroup, kRowTiles);
        if constexpr (kFormat == FUT_INT4)
          multiply_int4<kGroup, kTokenTiles, kRowTiles>(data, p.scale_is_fp16, x, x_row, corrections, offset + done,
                                                        width, lane, sum);
        else
          multiply_rows<kFormat, kTokenTiles, kRowTiles>(data, x, x_row, offset + done, width, lane, sum);
        __syncwarp();
        if (stream.more()) stream.fetch();
        if (++stage == p.stages) {
          stage = 0;
          parity ^= 1;
        }
      }
      // The first time round every slot is free: a barrier that never completed a phase passes the other parity.
      barrier_wait(slot_free + slot * cluster + row_group, slot_parity);
      const int slot_floats = slot * at.slot_floats + slice_floats;
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j) {
        const int token = 8 * j + 2 * t;
        if (token >= p.tokens) continue;
        const float back[2] = {factors[token], factors[min(token + 1, p.tokens - 1)]};
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          if (kRowTiles > 1 && tile + r >= end) continue;
          const int place = slot_floats + (r * kTokenTiles + j) * kLanes * 4;
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[r][j][i] *= back[i & 1];
          if (cluster == 1)
            *reinterpret_cast<float4*>(partial + place) =
                make_float4(sum[r][j][0], sum[r][j][1], sum[r][j][2], sum[r][j][3]);
          else
            cluster_store(their_slots + 4 * place, sum[r][j], their_full + 8 * slot);
        }
      }
      if (cluster == 1) {
        __syncwarp();
        if (lane == 0) barrier_arrive(slot_full + slot);
      }
      if (++slot == p.slots) {
        slot = 0;
        slot_parity ^= 1;
      }
    }
  }
}

}  // namespace fut
