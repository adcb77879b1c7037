#include "epilogue_swiglu.cuh"
#include "gemm_launch.cuh"

namespace fut {

fut_status launch_swiglu_bf16(const GemmCall& call, void* out, int64_t stride_bytes) {
  return launch_gemm<SwigluBf16>(call, {static_cast<uint8_t*>(out), stride_bytes});
}

}  // namespace fut
