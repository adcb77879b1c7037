// Warpgroup MMA with A in registers (PTX ISA, wgmma): D[64, N] += A[64, 16] B[N, 16]^T in BF16 or FP16 with FP32
// accumulators; B as in wgmma.cuh, or, for wgmma_transposed, as rows along N (swizzled_columns). wgmma_fence() must
// stand between the last write of A's registers and the instruction, and they must not change before it has been waited
// for.
//
// Thread t of the warpgroup holds of A the rows r = 16 (t / 32) + (t % 32) / 4 and r + 8: a[0] columns 2 (t % 4) and
// the next of r, a[1] of r + 8; a[2] and a[3] the same 8 columns further.

#pragma once

#include "wgmma.cuh"

namespace fut {

struct Fp16 {
  static constexpr int kBytes = 2;
};

#define FUT_D8(i)                                                                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define FUT_D16(i) FUT_D8(i), FUT_D8(i + 8)
#define FUT_D32(i) FUT_D16(i), FUT_D16(i + 16)
#define FUT_D40(i) FUT_D32(i), FUT_D8(i + 32)
#define FUT_D48(i) FUT_D32(i), FUT_D16(i + 32)
#define FUT_D64(i) FUT_D32(i), FUT_D32(i + 32)
#define FUT_D128(i) FUT_D64(i), FUT_D64(i + 64)
#define FUT_D8_NAMES "{%0, %1, %2, %3, %4, %5, %6, %7}"
#define FUT_D16_NAMES "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define FUT_D32_NAMES                                                                                          \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define FUT_D40_NAMES                                                                                \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39}"
#define FUT_D48_NAMES                                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "     \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, " \
  "%41, %42, %43, %44, %45, %46, %47}"
#define FUT_D64_NAMES                                                                                          \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "  \
  "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define FUT_D128_NAMES                                                                                           \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "   \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "    \
  "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "    \
  "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "    \
  "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, "   \
  "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, " \
  "%124, %125, %126, %127}"

// d = a b, or d += a b where `accumulate`.
#define FUT_WGMMA(function, transposed, Type, kCount, kA0, kA1, kA2, kA3, kB, kAccumulate, instruction, names,     \
                  operands)                                                                                        \
  __device__ __forceinline__ void function(Type, float (&d)[kCount], const uint32_t (&a)[4], uint64_t b,           \
                                           bool accumulate) {                                                      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " kAccumulate ", 0;\n" instruction " " names ", {" kA0 ", " kA1 \
                 ", " kA2 ", " kA3 "}, " kB ", p, 1, 1, " transposed ";\n}\n"                                      \
                 : operands                                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));         \
  }

FUT_WGMMA(wgmma, "0", Bf16, 8, "%8", "%9", "%10", "%11", "%12", "%13",
          "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16", FUT_D8_NAMES, FUT_D8(0))
FUT_WGMMA(wgmma, "0", Bf16, 16, "%16", "%17", "%18", "%19", "%20", "%21",
          "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16", FUT_D16_NAMES, FUT_D16(0))
FUT_WGMMA(wgmma, "0", Bf16, 32, "%32", "%33", "%34", "%35", "%36", "%37",
          "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", FUT_D32_NAMES, FUT_D32(0))
FUT_WGMMA(wgmma, "0", Bf16, 64, "%64", "%65", "%66", "%67", "%68", "%69",
          "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", FUT_D64_NAMES, FUT_D64(0))
FUT_WGMMA(wgmma, "0", Bf16, 128, "%128", "%129", "%130", "%131", "%132", "%133",
          "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16", FUT_D128_NAMES, FUT_D128(0))
FUT_WGMMA(wgmma, "0", Fp16, 8, "%8", "%9", "%10", "%11", "%12", "%13",
          "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16", FUT_D8_NAMES, FUT_D8(0))
FUT_WGMMA(wgmma, "0", Fp16, 16, "%16", "%17", "%18", "%19", "%20", "%21",
          "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16", FUT_D16_NAMES, FUT_D16(0))
FUT_WGMMA(wgmma, "0", Fp16, 32, "%32", "%33", "%34", "%35", "%36", "%37",
          "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16", FUT_D32_NAMES, FUT_D32(0))
FUT_WGMMA(wgmma, "0", Fp16, 64, "%64", "%65", "%66", "%67", "%68", "%69",
          "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16", FUT_D64_NAMES, FUT_D64(0))
FUT_WGMMA(wgmma, "0", Fp16, 128, "%128", "%129", "%130", "%131", "%132", "%133",
          "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16", FUT_D128_NAMES, FUT_D128(0))

FUT_WGMMA(wgmma_transposed, "1", Bf16, 32, "%32", "%33", "%34", "%35", "%36", "%37",
          "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", FUT_D32_NAMES, FUT_D32(0))
FUT_WGMMA(wgmma_transposed, "1", Bf16, 40, "%40", "%41", "%42", "%43", "%44", "%45",
          "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16", FUT_D40_NAMES, FUT_D40(0))
FUT_WGMMA(wgmma_transposed, "1", Bf16, 48, "%48", "%49", "%50", "%51", "%52", "%53",
          "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16", FUT_D48_NAMES, FUT_D48(0))
FUT_WGMMA(wgmma_transposed, "1", Bf16, 64, "%64", "%65", "%66", "%67", "%68", "%69",
          "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", FUT_D64_NAMES, FUT_D64(0))

#undef FUT_WGMMA
#undef FUT_D8_NAMES
#undef FUT_D16_NAMES
#undef FUT_D32_NAMES
#undef FUT_D40_NAMES
#undef FUT_D48_NAMES
#undef FUT_D64_NAMES
#undef FUT_D128_NAMES
#undef FUT_D128
#undef FUT_D64
#undef FUT_D48
#undef FUT_D40
#undef FUT_D32
#undef FUT_D16
#undef FUT_D8

}  // namespace fut
