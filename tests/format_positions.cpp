// Prints every index that csrc/format.h computes, for tests/test_format_header.py to compare with the Python tables.

#include <cstdio>

#include "format.h"

namespace {

// The header must be usable where a kernel needs constants.
static_assert(fut::code_place(fut::NibbleOrder::kMmaPair, 0, 0).nibble == 0);
static_assert(fut::kPairMaskEven << 4 == fut::kPairMaskOdd);
static_assert(fut::word_index(fut::NibbleOrder::kLinear, int64_t{1} << 31, 0, 64) ==
              (int64_t{1} << 31) / 16 * 64 * 128);

void print_order(const char* name, fut::NibbleOrder order) {
  for (int lane = 0; lane < fut::kLanes; ++lane) {
    for (int word = 0; word < fut::kWordsPerLane; ++word) {
      for (int nibble = 0; nibble < fut::kNibblesPerWord; ++nibble) {
        const fut::TileElement e = fut::code_element(order, lane, word, nibble);
        const fut::CodePlace p = fut::code_place(order, e.row, e.col);
        if (p.lane != lane || p.word != word || p.nibble != nibble) {
          std::printf("mismatch %s %d %d %d\n", name, lane, word, nibble);
        }
        std::printf("code %s %d %d %d %d %d\n", name, lane, word, nibble, e.row, e.col);
      }
    }
  }
  for (int row = 0; row < 48; row += 5) {
    for (int col = 0; col < 192; col += 7) {
      std::printf("word %s %d %d %lld\n", name, row, col, static_cast<long long>(fut::word_index(order, row, col, 3)));
    }
  }
}

}  // namespace

int main() {
  std::printf("constants %d %d %d %d\n", fut::kTileRows, fut::kTileCols, fut::kCodeZero, fut::kMatrixAlign);
  print_order("mma_m16n8k16_a_pair/1", fut::NibbleOrder::kMmaPair);
  print_order("mma_m16n8k16_a/1", fut::NibbleOrder::kMmaSingle);
  print_order("linear/1", fut::NibbleOrder::kLinear);
  for (int row = 0; row < 48; ++row) {
    for (int group = 0; group < 3; ++group) {
      std::printf("scale %d %d %lld\n", row, group, static_cast<long long>(fut::scale_index(row, group, 3)));
    }
  }
  for (int channel = 0; channel < 24; ++channel) {
    for (int half = 0; half < 2; ++half) {
      std::printf("row %d %d %lld %lld\n", channel, half,
                  static_cast<long long>(fut::interleaved_row(1, channel, half)),
                  static_cast<long long>(fut::interleaved_row(8, channel, half)));
    }
  }
  std::printf("sites %d %d %d %d %d\n", fut::kSiteQkv, fut::kSiteO, fut::kSiteGateUp, fut::kSiteDown, fut::kSites);
  return 0;
}
