// Where the decode cache keeps K and V: one block is 64 tokens of one KV head of one layer, read by one bulk copy.
//
// Both products of attention have the cache on the A operand of mma.sync.m16n8k16 and the query heads on n8: S^T = K q
// with 16 tokens by 16 dims of K, O^T = V^T p with 16 channels by 16 tokens of V. Every order below is that of A
// fragments: a lane's share lies in one place and needs no shuffle. No byte holds two tokens, so an append writes and
// never reads.
//
// Needs nothing but C++17, so that a host compiler can test it (tests/test_kv_block.py holds the twin in NumPy).

#pragma once

#include <cstdint>

#include "../format.h"

namespace fut {

inline constexpr int kPageTokens = 64;
inline constexpr int kCodesCentre = 8;

// Half a byte: the code is bits shift .. shift + 3 of byte `byte` of the block.
struct CodeBits {
  int byte;
  int shift;
};

// An INT4 block. Words are read as two halves of 16 bits (format.h, kMmaPair): `w & 0x000f000f` is a register of an
// even tile of 16 dims, `w & 0x00f000f0` the same register of the odd tile beside it, and `w >> 8` holds the next
// registers. Where head_dim / 16 is odd the last tile has a section of its own, in which the two nibbles of a byte are
// dims (channels) 8 apart.
//
//   keys          [token 64][lane & 3][tile pair] words     -> registers a0, a2 of the token's row
//   last keys     [16 tokens][lane] words                   -> a0, a2 (low byte of a half: token g), a1, a3 (g + 8)
//   values        [16 tokens][a0 a1 | a2 a3][lane][tile pair] words
//   last values   [16 tokens][lane] words                   -> low byte of a half: a0, a1; high byte: a2, a3
//   key scales    [token % 8][token / 8] words              scale in the low half, zero point in the high half, BF16
//   value scales  the same
template <int kDim>
struct Int4Block {
  static_assert(kDim % 16 == 0 && kDim >= 32, "a head is cut into tiles of 16");
  static constexpr int kTilePairs = kDim / 32;
  static constexpr bool kLastTile = kDim % 32 != 0;

  static constexpr int kPairSection = kPageTokens * 4 * kTilePairs * 4;
  static constexpr int kLastSection = kLastTile ? kPageTokens * 8 : 0;
  static constexpr int kLastKeys = kPairSection;
  static constexpr int kValues = kLastKeys + kLastSection;
  static constexpr int kLastValues = kValues + kPairSection;
  static constexpr int kKeyScales = kLastValues + kLastSection;
  static constexpr int kValueScales = kKeyScales + kPageTokens * 4;
  static constexpr int kBytes = kValueScales + kPageTokens * 4;
  static_assert(kBytes % 16 == 0, "bulk copies move multiples of 16 bytes");

  // Words of a lane for tokens 8 * octet + lane / 4: [kTilePairs] at this byte.
  FUT_HD static constexpr int key_words(int octet, int lane) { return (octet * 32 + lane) * kTilePairs * 4; }
  FUT_HD static constexpr int last_key_word(int m_tile, int lane) { return kLastKeys + (m_tile * 32 + lane) * 4; }

  // Words of a lane for tokens 16 * k_tile + 8 * high + 2 * (lane % 4) (low halves) and the token after it (high
  // halves): [kTilePairs] at this byte.
  FUT_HD static constexpr int value_words(int k_tile, int high, int lane) {
    return kValues + ((k_tile * 2 + high) * 32 + lane) * kTilePairs * 4;
  }
  FUT_HD static constexpr int last_value_word(int k_tile, int lane) { return kLastValues + (k_tile * 32 + lane) * 4; }

  FUT_HD static constexpr CodeBits key(int token, int dim) {
    const int col = dim & 15;
    const int quad_lane = col >> 1 & 3;
    const int half = col & 1;
    const int high = col >> 3;
    if (dim < 32 * kTilePairs) {
      const int lane = 4 * (token & 7) + quad_lane;
      return {key_words(token >> 3, lane) + (dim >> 5) * 4 + 2 * half + high, 4 * (dim >> 4 & 1)};
    }
    return {last_key_word(token >> 4, 4 * (token & 7) + quad_lane) + 2 * half + (token >> 3 & 1), 4 * high};
  }

  FUT_HD static constexpr CodeBits value(int token, int channel) {
    const int lane = 4 * (channel & 7) + (token >> 1 & 3);
    const int half = token & 1;
    const int high = token >> 3 & 1;
    const int row_high = channel >> 3 & 1;
    if (channel < 32 * kTilePairs) {
      return {value_words(token >> 4, high, lane) + (channel >> 5) * 4 + 2 * half + row_high, 4 * (channel >> 4 & 1)};
    }
    return {last_value_word(token >> 4, lane) + 2 * half + high, 4 * row_high};
  }

  // Byte of the scale word of a token in its section; a lane's tokens g, g + 8, ... are neighbours.
  FUT_HD static constexpr int scale_word(int token) { return ((token & 7) * 8 + (token >> 3)) * 4; }

  // The two dims (channels) that share a byte of one token, for byte 0 .. kDim / 2 - 1: low nibble, then high.
  FUT_HD static constexpr int low_dim(int byte) {
    return byte < 16 * kTilePairs ? (byte >> 4) * 32 + (byte & 15) : 32 * kTilePairs + (byte & 7);
  }
  FUT_HD static constexpr int high_dim(int byte) { return low_dim(byte) + (byte < 16 * kTilePairs ? 16 : 8); }
};

// A BF16 block: A fragments as they are.
//
//   keys    [token / 8][16 dims][lane] 2 words: a0 and a2 (a1 and a3 for odd octets)
//   values  [16 tokens][16 channels][lane] 4 words: a0 .. a3
template <int kDim>
struct Bf16Block {
  static constexpr int kTiles = kDim / 16;
  static constexpr int kValues = kPageTokens * kDim * 2;
  static constexpr int kBytes = 2 * kValues;
  // Keys, and values, of 16 tokens lie together.
  static constexpr int kSixteenTokens = 16 * kDim * 2;

  FUT_HD static constexpr int key_words(int octet, int tile, int lane) {
    return ((octet * kTiles + tile) * 32 + lane) * 8;
  }
  FUT_HD static constexpr int value_words(int k_tile, int tile, int lane) {
    return kValues + ((k_tile * kTiles + tile) * 32 + lane) * 16;
  }

  // Byte of an element.
  FUT_HD static constexpr int key(int token, int dim) {
    const int lane = 4 * (token & 7) + (dim >> 1 & 3);
    return key_words(token >> 3, dim >> 4, lane) + (dim >> 3 & 1) * 4 + (dim & 1) * 2;
  }
  FUT_HD static constexpr int value(int token, int channel) {
    const int lane = 4 * (channel & 7) + (token >> 1 & 3);
    const int word = 2 * (token >> 3 & 1) + (channel >> 3 & 1);
    return value_words(token >> 4, channel >> 4, lane) + word * 4 + (token & 1) * 2;
  }
};

FUT_HD constexpr int64_t kv_block_bytes(int bits, int head_dim) {
  const int64_t elements = int64_t{2} * kPageTokens * head_dim;
  return bits == 4 ? elements / 2 + 2 * kPageTokens * 4 : elements * 2;
}

static_assert(Int4Block<128>::kBytes == kv_block_bytes(4, 128) && Int4Block<80>::kBytes == kv_block_bytes(4, 80));
static_assert(Bf16Block<96>::kBytes == kv_block_bytes(16, 96));

}  // namespace fut
