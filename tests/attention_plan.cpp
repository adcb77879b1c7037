// Tells tests/test_attention_plan.py what csrc/prefill/attention_plan.h says of a chunk: keys of each tile, then for
// each level up to one past the last the tiles up to it and the level below it.

#include "prefill/attention_plan.h"

#include <cstdio>

int main() {
  int position, tokens, group;
  if (std::scanf("%d %d %d", &position, &tokens, &group) != 3) return 1;
  const fut::ChunkTiles chunk = {position, tokens, group};
  for (int tile = 0; tile < chunk.count(); ++tile) std::printf("%d ", chunk.keys(tile));
  std::printf("\n");
  const int last = fut::ChunkTiles::level_of(position + tokens) + 1;
  for (int level = 0; level <= last; ++level) std::printf("%d,%d ", chunk.up_to(level), chunk.below(level));
  std::printf("\n%d,%d\n", chunk.up_to(fut::kNoLevel - 1), chunk.below(fut::kNoLevel));
  return 0;
}
