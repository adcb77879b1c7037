// Chooses how a product is spread over the card, and launches it.

#include <atomic>

#include "../host/kernel_attributes.h"
#include "projection.cuh"
#include "projection.h"

namespace fut {

namespace {

// Shared memory up to which two kernels' blocks fit on one SM, so that the next kernel can fetch its weights early.
constexpr int kSharedForTwo = 112 * 1024;
// Activations of a block beyond which K is shared out over more blocks of a cluster.
constexpr int kActivationBudget = 40 * 1024;
constexpr int kMostStages = 8;
constexpr int kMostSlots = 4;

// Clusters of `cluster` blocks that the card runs at once, one block an SM: what does not fit would run as a second
// wave. Its graphics clusters differ in their number of SMs, so it is less than the number of SMs suggests.
template <class Kernel>
cudaError_t clusters_at_once(Kernel kernel, int cluster, const CardLimits& card, int* count) {
  *count = card.sm_count;
  if (cluster == 1) return cudaSuccess;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(card.sm_count / cluster * cluster);
  config.blockDim = dim3(kProjectionThreads);
  config.dynamicSmemBytes = card.shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(count, kernel, &config);
}

template <int kFormat, int kGroup, int kTokenTiles, int kRowTiles>
cudaError_t launch(ProjectionParams p, const CardLimits& card, bool dependent, cudaStream_t stream) {
  const auto kernel = project<kFormat, kGroup, kTokenTiles, kRowTiles>;
  const auto fits = [&](int bytes) {
    return ProjectionLayout(p, kFormat, kGroup, kTokenTiles, kRowTiles).total <= bytes;
  };
  const auto activations = [&] { return p.tokens * (2 * local_columns(p) + 64); };
  p.stages = 2;
  p.slots = 1;
  for (p.cluster = 1; p.cluster < kSlices && activations() > kActivationBudget;) p.cluster *= 2;
  if (!fits(card.shared_bytes)) return cudaErrorInvalidConfiguration;
  // Attributes of the function and what the card makes of it, asked for once in the process; twice is harmless.
  static std::atomic<int> at_once[kSlices + 1];
  int most_clusters = at_once[p.cluster];
  if (most_clusters == 0) {
    cudaError_t error = share_multiprocessor(kernel);
    if (error != cudaSuccess) return error;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, card.shared_bytes);
    if (error != cudaSuccess) return error;
    error = clusters_at_once(kernel, p.cluster, card, &most_clusters);
    if (error != cudaSuccess) return error;
    if (most_clusters < 1) return cudaErrorInvalidConfiguration;
    at_once[p.cluster] = most_clusters;
  }
  const int tiles_a_round = p.cluster * kRowTiles;
  const int clusters = min(most_clusters, (p.tiles + tiles_a_round - 1) / tiles_a_round);
  const int budget = fits(kSharedForTwo) ? kSharedForTwo : card.shared_bytes;
  const auto grow = [&](int32_t& count, int most) {
    while (count < most) {
      ++count;
      if (!fits(budget)) {
        --count;
        return;
      }
    }
  };
  grow(p.slots, 2);
  grow(p.stages, kMostStages);
  grow(p.slots, kMostSlots);
  const int bytes = ProjectionLayout(p, kFormat, kGroup, kTokenTiles, kRowTiles).total;
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (p.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = p.cluster;
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  if (dependent) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(clusters * p.cluster);
  config.blockDim = dim3(kProjectionThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, p);
}

template <int kFormat, int kGroup>
cudaError_t launch_tokens(const ProjectionParams& p, const CardLimits& card, bool dependent, cudaStream_t stream) {
  if (p.tokens <= 8) return launch<kFormat, kGroup, 1, 1>(p, card, dependent, stream);
  if (p.tokens <= 16) return launch<kFormat, kGroup, 2, 2>(p, card, dependent, stream);
  return launch<kFormat, kGroup, 4, 2>(p, card, dependent, stream);
}

cudaError_t launch_format(const fut_matrix& m, const ProjectionParams& p, const CardLimits& card, bool dependent,
                          cudaStream_t stream) {
  if (m.format == FUT_E4M3) return launch_tokens<FUT_E4M3, 64>(p, card, dependent, stream);
  if (m.format == FUT_BF16) return launch_tokens<FUT_BF16, 64>(p, card, dependent, stream);
  if (m.group_size == 32) return launch_tokens<FUT_INT4, 32>(p, card, dependent, stream);
  if (m.group_size == 64) return launch_tokens<FUT_INT4, 64>(p, card, dependent, stream);
  return launch_tokens<FUT_INT4, 128>(p, card, dependent, stream);
}

__global__ void sum_squares(const __nv_bfloat16* x, float* sums, int rows, int cols) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int parts = (cols + 15) / 16;
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < static_cast<int64_t>(rows) * parts;
       i += gridDim.x * blockDim.x) {
    const int64_t row = i / parts;
    const int first = static_cast<int>(i % parts) * 16;
    float sum = 0.f;
    for (int c = first; c < min(first + 16, cols); ++c) {
      const float value = __bfloat162float(x[row * cols + c]);
      sum += value * value;
    }
    sums[i] = sum;
  }
}

}  // namespace

cudaError_t card_limits(CardLimits* limits) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&limits->sm_count, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&limits->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

const char* projection_problem(const fut_matrix& m) {
  const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  if (m.weight == nullptr || !aligned(m.weight) || !aligned(m.scale)) return "its tensors must be 16-byte aligned";
  if (m.rows < 1 || m.cols < 1 || m.stored_rows < m.rows || m.stored_cols < m.cols)
    return "its stored shape is too small";
  if (m.stored_rows % kTileRows != 0) return "its stored rows must be a multiple of 16";
  if (m.format == FUT_INT4) {
    if (m.group_size != 32 && m.group_size != 64 && m.group_size != 128) return "its group size must be 32, 64 or 128";
    if (m.stored_cols % (m.group_size > kTileCols ? m.group_size : kTileCols) != 0)
      return "its stored columns must be whole tiles and groups";
    if (m.scale == nullptr) return "it has no scales";
  } else if (m.format == FUT_E4M3 || m.format == FUT_BF16) {
    if (m.stored_cols % kMatrixAlign != 0) return "its stored columns must be a multiple of 16";
    if (m.format == FUT_E4M3 && m.scale == nullptr) return "it has no scales";
  } else {
    return "its format is unknown";
  }
  return nullptr;
}

cudaError_t launch_projection(const fut_matrix& m, const ProjectionInput& input, const ProjectionOutput& output,
                              const CardLimits& card, bool dependent, cudaStream_t stream) {
  ProjectionParams p = {};
  p.weight = static_cast<const uint8_t*>(m.weight);
  p.scale = m.format == FUT_INT4 ? static_cast<const uint8_t*>(m.scale) : nullptr;
  p.channel_scale = m.format == FUT_E4M3 ? static_cast<const float*>(m.scale) : nullptr;
  p.bias = m.bias;
  p.gain = m.gain;
  p.x = static_cast<const __nv_bfloat16*>(input.x);
  p.square_sums = input.square_sums;
  p.square_parts = input.square_parts;
  p.gather = input.gather;
  p.eps = input.eps;
  p.y = output.y;
  p.y_square_sums = output.square_sums;
  p.epilogue = output.epilogue;
  p.row_order = m.row_order;
  p.rows = m.rows;
  p.cols = m.cols;
  p.tiles = m.stored_rows / kTileRows;
  p.stored_cols = m.stored_cols;
  p.unit_cols = m.format == FUT_INT4 && m.group_size > kTileCols ? m.group_size : kTileCols;
  p.units = (m.stored_cols + p.unit_cols - 1) / p.unit_cols;
  p.scale_is_fp16 = m.scale_is_fp16;
  // As many tokens at once as fit. The results do not depend on it.
  const int64_t y_bytes = static_cast<int64_t>(m.rows) * (output.epilogue == FUT_STORE      ? 4
                                                          : output.epilogue == FUT_RESIDUAL ? 2
                                                                                            : 1);
  int most = kMostTokens;
  for (int first = 0; first < input.tokens;) {
    p.tokens = input.tokens - first < most ? input.tokens - first : most;
    if (input.gather != nullptr) {
      p.gather = input.gather + first;
    } else {
      p.x = static_cast<const __nv_bfloat16*>(input.x) + static_cast<int64_t>(first) * m.cols;
      if (input.square_sums != nullptr)
        p.square_sums = input.square_sums + static_cast<int64_t>(first) * input.square_parts;
    }
    p.y = static_cast<uint8_t*>(output.y) + first * y_bytes;
    if (output.square_sums != nullptr) p.y_square_sums = output.square_sums + static_cast<int64_t>(first) * p.tiles;
    const cudaError_t error = launch_format(m, p, card, dependent, stream);
    if (error == cudaErrorInvalidConfiguration && most > 1) {
      most /= 2;
      continue;
    }
    if (error != cudaSuccess) return error;
    first += p.tokens;
  }
  return cudaSuccess;
}

cudaError_t launch_square_sums(const void* x, float* sums, int rows, int cols, bool dependent, cudaStream_t stream) {
  const cudaError_t shared = share_multiprocessor(sum_squares);
  if (shared != cudaSuccess) return shared;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((rows * ((cols + 15) / 16) + 127) / 128);
  config.blockDim = dim3(128);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, sum_squares, static_cast<const __nv_bfloat16*>(x), sums, rows, cols);
}

}  // namespace fut
