// Predicated loads from global memory (PTX ISA, ld).

#pragma once

#include <cstdint>

namespace fut {

// 16 bytes, or zeros where `there` is false; no branch, behind which the compiler would wait for the load.
__device__ __forceinline__ void load_if(const void* from, uint32_t (&w)[4], bool there) {
  w[0] = w[1] = w[2] = w[3] = 0;
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.b32 there, %5, 0;\n"
      "@there ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+r"(w[0]), "+r"(w[1]), "+r"(w[2]), "+r"(w[3])
      : "l"(from), "r"(static_cast<int>(there))
      : "memory");
}

}  // namespace fut
