#include "epilogue_swiglu.cuh"
#include "gemm_launch.cuh"

namespace fut {

fut_status launch_swiglu(const GemmCall& call, const QuantizedOut& out) { return launch_gemm<SwigluE4m3>(call, out); }

}  // namespace fut
