#include "epilogue_residual.cuh"
#include "gemm_launch.cuh"

namespace fut {

fut_status launch_residual(const GemmCall& call, const ResidualParams& params) {
  return launch_gemm<AddResidual>(call, params);
}

}  // namespace fut
