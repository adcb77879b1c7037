// Prints every place that csrc/decode/kv_block.cuh computes, for tests/test_kv_block.py to compare with the Python
// twin.

#include <cstdio>
#include <initializer_list>

#include "decode/attention_work.cuh"
#include "decode/kv_block.cuh"

namespace {

template <int kDim>
void print_blocks() {
  using Int4 = fut::Int4Block<kDim>;
  using Bf16 = fut::Bf16Block<kDim>;
  std::printf("bytes 4 %d %d %lld\n", kDim, Int4::kBytes, static_cast<long long>(fut::kv_block_bytes(4, kDim)));
  std::printf("bytes 16 %d %d %lld\n", kDim, Bf16::kBytes, static_cast<long long>(fut::kv_block_bytes(16, kDim)));
  for (int token = 0; token < fut::kPageTokens; ++token) {
    for (int dim = 0; dim < kDim; ++dim) {
      const fut::CodeBits key = Int4::key(token, dim);
      const fut::CodeBits value = Int4::value(token, dim);
      std::printf("int4 %d %d %d %d %d\n", kDim, token, dim, 2 * key.byte + key.shift / 4,
                  2 * value.byte + value.shift / 4);
      std::printf("bf16 %d %d %d %d %d\n", kDim, token, dim, Bf16::key(token, dim) / 2, Bf16::value(token, dim) / 2);
    }
    std::printf("scale %d %d %d %d\n", kDim, token, (Int4::kKeyScales + Int4::scale_word(token)) / 4,
                (Int4::kValueScales + Int4::scale_word(token)) / 4);
    for (int byte = 0; byte < kDim / 2; ++byte) {
      const int low = Int4::low_dim(byte);
      const int high = Int4::high_dim(byte);
      const bool together = Int4::key(token, low).byte == Int4::key(token, high).byte &&
                            Int4::value(token, low).byte == Int4::value(token, high).byte &&
                            Int4::key(token, low).shift == 0 && Int4::value(token, low).shift == 0 &&
                            Int4::key(token, high).shift == 4 && Int4::value(token, high).shift == 4;
      if (!together) std::printf("apart %d %d %d\n", kDim, token, byte);
    }
  }
}

}  // namespace

int main() {
  print_blocks<64>();
  print_blocks<80>();
  print_blocks<96>();
  print_blocks<128>();
  for (const int kv_heads : {1, 2, 3, 8, 32, 128}) {
    int most = 0;
    for (int context = 1; context <= 131072; context = context < 4096 ? context + 1 : context + 511) {
      const int size = 1 << fut::piece_shift(context, kv_heads);
      const int pieces = (context + size - 1) / size;
      most = pieces > most ? pieces : most;
      if (pieces > fut::max_pieces(context, kv_heads)) std::printf("too_many %d %d\n", context, kv_heads);
      if (size % fut::kPageTokens != 0 || size > 32 * fut::kPageTokens) std::printf("bad_size %d %d\n", context, size);
    }
    std::printf("pieces %d %d %d\n", kv_heads, most, fut::max_pieces(131072, kv_heads));
  }
}
