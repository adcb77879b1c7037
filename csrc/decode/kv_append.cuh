// Writing one token's K or V into its block, in global memory and in a copy of the block in shared memory.

#pragma once

#include "head_vector.cuh"
#include "kv_block.cuh"

namespace fut {

// K (index 0) and V (1) of the newest token, as they go into the block.
template <int kDim>
struct NewestToken {
  union {
    uint8_t code[2][kDim];
    __nv_bfloat16 element[2][kDim];
  };
  uint32_t scale[2];  // scale and zero point
};

// One of K and V, by one warp, into token `token` of a block.
template <int kDim, int kBits>
__device__ __forceinline__ void store_newest(uint8_t* block, const NewestToken<kDim>& newest, int which, int token,
                                             int lane) {
  if constexpr (kBits == 4) {
    using Block = Int4Block<kDim>;
#pragma unroll
    for (int i = lane; i < kDim / 2; i += 32) {
      const int low = Block::low_dim(i);
      const uint8_t pair = newest.code[which][low] | newest.code[which][Block::high_dim(i)] << 4;
      block[which == 0 ? Block::key(token, low).byte : Block::value(token, low).byte] = pair;
    }
    if (lane == 0) {
      uint8_t* scales = block + (which == 0 ? Block::kKeyScales : Block::kValueScales);
      *reinterpret_cast<uint32_t*>(scales + Block::scale_word(token)) = newest.scale[which];
    }
  } else {
    using Block = Bf16Block<kDim>;
#pragma unroll
    for (int i = lane; i < kDim; i += 32) {
      const int byte = which == 0 ? Block::key(token, i) : Block::value(token, i);
      *reinterpret_cast<__nv_bfloat16*>(block + byte) = newest.element[which][i];
    }
  }
}

// The same into what a ring slot of 16 tokens holds of a BF16 block: its keys, then its values.
template <int kDim>
__device__ __forceinline__ void store_newest_sixteen(uint8_t* unit, const NewestToken<kDim>& newest, int token,
                                                     int lane) {
  using Block = Bf16Block<kDim>;
#pragma unroll
  for (int i = lane; i < kDim; i += 32) {
    *reinterpret_cast<__nv_bfloat16*>(unit + Block::key(token, i)) = newest.element[0][i];
    *reinterpret_cast<__nv_bfloat16*>(unit + Block::kSixteenTokens + Block::value(token, i) - Block::kValues) =
        newest.element[1][i];
  }
}

// K (which 0) or V (1) of a token, already rounded to BF16, rotated and quantised as the cache keeps it; one warp.
template <int kDim, int kBits>
__device__ __forceinline__ void finish_newest(NewestToken<kDim>& newest, int which, HeadVector<kDim> head,
                                              bool rotation, bool zero_point, int lane) {
  if constexpr (kBits == 4) {
    if (rotation) rotate_head<kDim>(head, lane);
    const uint32_t scale = quantize_head<kDim>(head, zero_point, newest.code[which], lane);
    if (lane == 0) newest.scale[which] = scale;
  } else {
#pragma unroll
    for (int e = 0; e < HeadVector<kDim>::kPerLane; ++e) {
      if (HeadVector<kDim>::has(e, lane)) newest.element[which][lane + 32 * e] = __float2bfloat16_rn(head.x[e]);
    }
  }
  __syncwarp();
}

// The same from what the projection left: K is normalised and turned first, and both are rounded.
template <int kDim, int kBits>
__device__ __forceinline__ void prepare_newest(NewestToken<kDim>& newest, int which, const float* raw,
                                               const float* k_norm, float eps, const float* cosine, const float* sine,
                                               bool rotation, bool zero_point, int lane) {
  HeadVector<kDim> head =
      which == 0 ? turned_head<kDim>(raw, k_norm, eps, cosine, sine, lane) : plain_head<kDim>(raw, lane);
  round_head<kDim>(head);
  finish_newest<kDim, kBits>(newest, which, head, rotation, zero_point, lane);
}

}  // namespace fut
