#include "epilogue_plain.cuh"
#include "gemm_launch.cuh"

namespace fut {

fut_status launch_store_bf16(const GemmCall& call, void* out, int64_t stride_bytes) {
  return launch_gemm<StoreBf16>(call, {static_cast<uint8_t*>(out), stride_bytes});
}

}  // namespace fut
