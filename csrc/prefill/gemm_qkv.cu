#include "epilogue_qkv.cuh"
#include "gemm_launch.cuh"

namespace fut {

fut_status launch_qkv(const GemmCall& call, const QkvParams& params, int head_dim) {
  switch (head_dim) {
    case 64:
      return launch_gemm<StoreQkv<64>>(call, params);
    case 80:
      return launch_gemm<StoreQkv<80>>(call, params);
    case 96:
      return launch_gemm<StoreQkv<96>>(call, params);
    case 128:
      return launch_gemm<StoreQkv<128>>(call, params);
    default:
      return fail(FUT_INVALID, "head_dim %d is not supported; 64, 80, 96 and 128 are", head_dim);
  }
}

}  // namespace fut
