// Warpgroup MMA (PTX ISA, wgmma): D[64, N] += A[64, K] B[N, K]^T with FP32 accumulators. B, and A where it is not in
// registers, lie in shared memory as rows in the swizzle that a tensor copy makes (tensor_copy.cuh).
//
// Thread t of the warpgroup holds of D the rows 16 (t / 32) + (t % 32) / 4 and 8 below, and in d[4 j .. 4 j + 3] their
// columns 8 j + 2 (t % 4) and the next: two of the upper row, then two of the lower.

#pragma once

#include <cstdint>

#include "bulk_copy.cuh"

namespace fut {

// Operand types. Of either, an instruction takes 32 bytes of K.
struct E4m3 {
  static constexpr int kBytes = 1;
};
struct Bf16 {
  static constexpr int kBytes = 2;
};

// Swizzles of rows of 128, 64 and 32 bytes, as descriptors name them.
template <int kRowBytes>
inline constexpr uint64_t kSwizzleOf = kRowBytes == 128  ? 1
                                       : kRowBytes == 64 ? 2
                                                         : 3;

// Describes rows of so many bytes along K, swizzled, one behind the other. The address must be a multiple of eight
// rows' bytes; add 2 for each 32 bytes along a row.
template <int kRowBytes = 128>
__device__ __forceinline__ uint64_t swizzled_rows(const void* shared) {
  constexpr uint64_t kEightRows = 8 * kRowBytes >> 4;
  return (shared_address(shared) & 0x3ffff) >> 4 | 1ull << 16 | kEightRows << 32 | kSwizzleOf<kRowBytes> << 62;
}

// The same for rows along N, for B read transposed: row k holds kRowBytes of N, and further N lies `kBlockBytes` after.
// Add kRowBytes >> 4 for each row of K.
template <int kRowBytes, int kBlockBytes>
__device__ __forceinline__ uint64_t swizzled_columns(const void* shared) {
  constexpr uint64_t kEightRows = 8 * kRowBytes >> 4, kBlock = kBlockBytes >> 4;
  return (shared_address(shared) & 0x3ffff) >> 4 | kBlock << 16 | kEightRows << 32 | kSwizzleOf<kRowBytes> << 62;
}

// Before the first wgmma that reads registers (accumulators, or A) which ordinary instructions have written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of accumulators across: to it, wgmma writes them when it is issued.
template <int kCount>
__device__ __forceinline__ void settle(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Operands of the inline assembly: all elements of d.
#define FUT_D8(i)                                                                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define FUT_D64(i)                                                                                          \
  FUT_D8(i), FUT_D8(i + 8), FUT_D8(i + 16), FUT_D8(i + 24), FUT_D8(i + 32), FUT_D8(i + 40), FUT_D8(i + 48), \
      FUT_D8(i + 56)
#define FUT_D128 FUT_D64(0), FUT_D64(64)
#define FUT_D64_NAMES                                                                                     \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "  \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "  \
  "%62, %63}"
#define FUT_D128_NAMES                                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "  \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "  \
  "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "  \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, "      \
  "%101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, "      \
  "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"

// d = a b, or d += a b where `accumulate`.
#define FUT_WGMMA(Type, kCount, kA, kB, kAccumulate, instruction, modifiers, names, operands)                   \
  __device__ __forceinline__ void wgmma(Type, float (&d)[kCount], uint64_t a, uint64_t b, bool accumulate) {    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " kAccumulate ", 0;\n" instruction " " names ", " kA ", " kB \
                 ", p, " modifiers ";\n}\n"                                                                     \
                 : operands                                                                                     \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                          \
  }

FUT_WGMMA(E4m3, 64, "%64", "%65", "%66", "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3", "1, 1", FUT_D64_NAMES,
          FUT_D64(0))
FUT_WGMMA(E4m3, 128, "%128", "%129", "%130", "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3", "1, 1",
          FUT_D128_NAMES, FUT_D128)
FUT_WGMMA(Bf16, 64, "%64", "%65", "%66", "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", "1, 1, 0, 0",
          FUT_D64_NAMES, FUT_D64(0))
FUT_WGMMA(Bf16, 128, "%128", "%129", "%130", "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16", "1, 1, 0, 0",
          FUT_D128_NAMES, FUT_D128)

#undef FUT_WGMMA
#undef FUT_D64_NAMES
#undef FUT_D128_NAMES
#undef FUT_D128
#undef FUT_D64
#undef FUT_D8

}  // namespace fut
