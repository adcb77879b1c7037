// Where the artifact keeps its INT4 codes, scales and interleaved rows: the kernels' side of docs/artifact.md.
//
// Needs nothing but C++17, so that a host compiler can test it against the Python tables (tests/test_format_header.py).
// Everything is constexpr: a kernel that asks with constant arguments pays nothing at run time.

#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FUT_HD __host__ __device__
#else
#define FUT_HD
#endif

namespace fut {

// One INT4 tile: m16 of mma.sync.m16n8k16 by 64 inputs, so that a lane's share is one 16-byte load.
inline constexpr int kTileRows = 16;
inline constexpr int kTileCols = 64;
inline constexpr int kLanes = 32;
inline constexpr int kWordsPerLane = 4;
inline constexpr int kNibblesPerWord = 8;
inline constexpr int kWordsPerTile = kLanes * kWordsPerLane;

// w = (code - kCodeZero) * scale. Padding holds the code kCodeZero.
inline constexpr int kCodeZero = 8;

// Rows and columns of E4M3 and BF16 matrices are padded to multiples of this.
inline constexpr int kMatrixAlign = 16;

// Order of the four activation scales of a layer in its `activation_scale` tensor.
enum Site : int { kSiteQkv = 0, kSiteO = 1, kSiteGateUp = 2, kSiteDown = 3, kSites = 4 };

// The manifest's `nibble_order`.
enum class NibbleOrder {
  kMmaPair,    // "mma_m16n8k16_a_pair/1"
  kMmaSingle,  // "mma_m16n8k16_a/1"
  kLinear,     // "linear/1"
};

// Where a code lies inside its tile: nibble i of a word is its bits 4i .. 4i+3.
struct CodePlace {
  int lane;
  int word;
  int nibble;
};

// Row and column inside a 16 x 64 tile.
struct TileElement {
  int row;
  int col;
};

// The A operand of mma.sync.m16n8k16 with 16-bit elements: lane l holds four registers of two halves.
FUT_HD constexpr TileElement a_fragment_element(int lane, int reg, int half) {
  return {(lane >> 2) + 8 * (reg & 1), 2 * (lane & 3) + half + 8 * (reg >> 1)};
}

FUT_HD constexpr TileElement code_element(NibbleOrder order, int lane, int word, int nibble) {
  if (order == NibbleOrder::kLinear) {
    const int position = (lane * kWordsPerLane + word) * kNibblesPerWord + nibble;
    return {position / kTileCols, position % kTileCols};
  }
  const int half = nibble >> 2;
  if (order == NibbleOrder::kMmaPair) {
    // Two neighbouring k16 tiles share words 2p and 2p + 1: `w & kPairMaskEven` is a register of the even tile,
    // `w & kPairMaskOdd` one of the odd tile (times 16), and a shift by kPairShift brings the next register.
    const int reg = 2 * (word & 1) + (nibble >> 1 & 1);
    const int k_tile = 2 * (word >> 1) + (nibble & 1);
    const TileElement element = a_fragment_element(lane, reg, half);
    return {element.row, 16 * k_tile + element.col};
  }
  const TileElement element = a_fragment_element(lane, nibble & 3, half);
  return {element.row, 16 * word + element.col};
}

FUT_HD constexpr CodePlace code_place(NibbleOrder order, int row, int col) {
  if (order == NibbleOrder::kLinear) {
    const int position = row * kTileCols + col;
    return {position / (kWordsPerLane * kNibblesPerWord), position / kNibblesPerWord % kWordsPerLane,
            position % kNibblesPerWord};
  }
  const int lane = 4 * (row & 7) + (col >> 1 & 3);
  const int reg = (row >> 3) + 2 * (col >> 3 & 1);
  const int half = col & 1;
  const int k_tile = col >> 4;
  if (order == NibbleOrder::kMmaPair) {
    return {lane, 2 * (k_tile >> 1) + (reg >> 1), 2 * (reg & 1) + (k_tile & 1) + 4 * half};
  }
  return {lane, k_tile, reg + 4 * half};
}

// kMmaPair: a word seen as two halves of 16 bits; OR with kFp16Magic makes the halves 1024 + q (even tile) and
// 1024 + 16 q (odd tile) in FP16.
inline constexpr uint32_t kPairMaskEven = 0x000f000fu;
inline constexpr uint32_t kPairMaskOdd = 0x00f000f0u;
inline constexpr int kPairShift = 8;
inline constexpr uint32_t kFp16Magic = 0x64006400u;

// Index into the INT4 tensor [rows / 16, cols / 64, 32, 4] of the word that holds a code; 64 bits, for a head passes
// 2^31 codes.
FUT_HD constexpr int64_t word_index(NibbleOrder order, int64_t row, int64_t col, int64_t k_tiles) {
  const CodePlace place = code_place(order, static_cast<int>(row % kTileRows), static_cast<int>(col % kTileCols));
  return ((row / kTileRows) * k_tiles + col / kTileCols) * kWordsPerTile + place.lane * kWordsPerLane + place.word;
}

// Scale order "tile16_pairs/1": rows g and g + 8 of a tile are neighbours, one 32-bit load for the lanes of group g.
FUT_HD constexpr int scale_position(int row_in_tile) { return 2 * (row_in_tile & 7) + (row_in_tile >> 3); }

// Index into the scale tensor [rows / 16, groups, 16].
FUT_HD constexpr int64_t scale_index(int64_t row, int64_t group, int64_t groups) {
  return ((row / kTileRows) * groups + group) * kTileRows + scale_position(static_cast<int>(row % kTileRows));
}

// Stored row of a channel of gate (half 0) or up (half 1): row orders "interleave1" and "interleave8".
FUT_HD constexpr int64_t interleaved_row(int block, int64_t channel, int half) {
  return (channel / block * 2 + half) * block + channel % block;
}

}  // namespace fut
