// What prefill shares with the decoder that its requests go on in.

#pragma once

#include "../decode/projection.h"
#include "../fut.h"

namespace fut {

struct DecoderView {
  const fut_decoder_config* config;
  const int32_t* page_table;  // device [max_slots, table_width], of the decode cache
  int32_t table_width;
  CardLimits card;
};

// Good as long as the decoder lives.
DecoderView view_decoder(const fut_decoder& decoder);

}  // namespace fut
