// Launches one epilogue's kernels.

#pragma once

#include <atomic>

#include "../host/error.h"
#include "../host/kernel_launch.h"
#include "gemm.cuh"
#include "gemm_call.h"

namespace fut {

// The kernel's launch, and how many clusters of it the card runs at once.
template <class Kernel>
fut_status prepare_kernel(Kernel kernel, int shared_bytes, int cluster, int* clusters) {
  FUT_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  int count = 0;
  FUT_CHECK(multiprocessor_count(&count));
  *clusters = count;
  if (cluster == 1) return FUT_OK;
  const LaunchShape shape = {dim3(count / cluster * cluster), kGemmThreads, shared_bytes, cluster};
  FUT_CHECK(with_launch_config(shape, nullptr, [&](const cudaLaunchConfig_t& config) {
    return cudaOccupancyMaxActiveClusters(clusters, kernel, &config);
  }));
  if (*clusters < 1) return fail(FUT_CUDA, "the card runs no cluster of %d blocks of the GEMM", cluster);
  return FUT_OK;
}

template <class Element, int kTileN, Accumulation kAccumulation, class Epilogue>
fut_status launch_tile(const GemmCall& call, const typename Epilogue::Params& params) {
  const auto kernel = gemm<Element, kTileN, kAccumulation, Epilogue>;
  constexpr int kSharedBytes = sizeof(GemmShared<kTileN, typename Epilogue::Params>);
  const int cluster = call.plan.cluster;
  static std::atomic<int> at_once[3];
  int clusters = at_once[cluster];
  if (clusters == 0) {
    const fut_status prepared = prepare_kernel(kernel, kSharedBytes, cluster, &clusters);
    if (prepared != FUT_OK) return prepared;
    at_once[cluster] = clusters;
  }
  CUtensorMap map_a, map_b;
  fut_status status = describe_operand(call.a, Element::kBytes, kGemmTileM, kGemmStageBytes, &map_a);
  if (status == FUT_OK) status = describe_operand(call.b, Element::kBytes, kTileN / 2, kGemmStageBytes, &map_b);
  if (status != FUT_OK) return status;
  GemmShape shape = {};
  shape.m = call.m;
  shape.n = call.n;
  shape.stages = static_cast<int32_t>(ceil_divide(int64_t{call.k} * Element::kBytes, kGemmStageBytes));
  shape.step = tile_step(kTileN, Epilogue::kHeadDim);
  shape.cluster = cluster;
  shape.order = {static_cast<int32_t>(ceil_divide(call.m, kGemmTileM * cluster)),
                 static_cast<int32_t>(ceil_divide(call.n, shape.step)), call.plan.group_m};
  if (int64_t{shape.order.rows + shape.order.group} * shape.order.columns > INT32_MAX)
    return fail(FUT_INVALID, "fut_gemm: m %d and n %d make too many tiles", call.m, call.n);
  const int32_t tiles = shape.order.count();
  const unsigned blocks = cluster * static_cast<unsigned>(tiles < clusters ? tiles : clusters);
  const LaunchShape launch = {dim3(blocks), kGemmThreads, kSharedBytes, cluster, call.dependent};
  FUT_CHECK(launch_kernel(kernel, launch, call.stream, map_a, map_b, shape, call.scales, params));
  return FUT_OK;
}

template <class Element, Accumulation kAccumulation, class Epilogue>
fut_status launch_accumulation(GemmCall call, const typename Epilogue::Params& params) {
  constexpr int kWidest = kAccumulation == Accumulation::kPromoted ? Epilogue::kPromotedTileN : 256;
  if (call.plan.tile_n == 0) {
    int count = 0;
    FUT_CHECK(multiprocessor_count(&count));
    call.plan = plan_gemm({call.m, call.n, int64_t{call.k} * Element::kBytes, Epilogue::kHeadDim, count,
                           kAccumulation == Accumulation::kPromoted, kWidest});
  }
  if (call.plan.tile_n == 128) return launch_tile<Element, 128, kAccumulation, Epilogue>(call, params);
  if constexpr (kWidest == 256) return launch_tile<Element, 256, kAccumulation, Epilogue>(call, params);
  return fail(FUT_INVALID, "fut_gemm: this epilogue has no tile of 256 columns with promoted sums");
}

template <class Epilogue>
fut_status launch_gemm(const GemmCall& call, const typename Epilogue::Params& params) {
  if (call.format == FUT_BF16) return launch_accumulation<Bf16, Accumulation::kTensorCore, Epilogue>(call, params);
  if (call.promoted) return launch_accumulation<E4m3, Accumulation::kPromoted, Epilogue>(call, params);
  return launch_accumulation<E4m3, Accumulation::kTensorCore, Epilogue>(call, params);
}

}  // namespace fut
