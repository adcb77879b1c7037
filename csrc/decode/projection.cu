// Chooses how a product is spread over the card, and launches it.

#include <atomic>

#include "../host/kernel_launch.h"
#include "projection.cuh"
#include "projection.h"

namespace fut {

namespace {

// Activations of a block beyond which K is shared out over more blocks of a cluster.
constexpr int kActivationBudget = 40 * 1024;
constexpr int kMostStages = 8;
constexpr int kMostSlots = 4;

// A kernel for some format and number of tokens, and what the card makes of it.
template <int kFormat, int kGroup, int kTokenTiles, int kRowTiles>
class Launcher {
 public:
  Launcher(const ProjectionParams& params, const CardLimits& card) : p_(params), card_(card) {}

  // cudaErrorInvalidConfiguration: so many tokens do not fit.
  cudaError_t launch(bool dependent, cudaStream_t stream) {
    int clusters = 0;
    const cudaError_t error = kShares ? choose_small_cluster(&clusters) : choose_fewest_rounds(&clusters);
    if (error != cudaSuccess) return error;
    const int both = p_.epilogue == FUT_RESIDUAL ? kWideShared : kNarrowShared;
    const bool shares = kShares && fits(both);
    const int budget = shares || (!kShares && fits(kNarrowShared)) ? both : card_.shared_bytes;
    grow(p_.slots, 2, budget);
    grow(p_.stages, kMostStages, budget);
    grow(p_.slots, kMostSlots, budget);
    const LaunchShape shape = {dim3(clusters * p_.cluster), kProjectionThreads, shares ? both : bytes(), p_.cluster,
                               dependent};
    return launch_kernel(kKernel, shape, stream, p_);
  }

 private:
  static constexpr auto kKernel = project<kFormat, kGroup, kTokenTiles, kRowTiles>;
  // Two blocks fit an SM's registers.
  static constexpr bool kShares = kTokenTiles == 1;

  int bytes() const { return ProjectionLayout(p_, kFormat, kGroup, kTokenTiles, kRowTiles).total; }
  bool fits(int budget) const { return bytes() <= budget; }
  int activation_bytes() const { return p_.tokens * (2 * local_columns(p_) + 64); }

  void grow(int32_t& count, int most, int budget) const {
    while (count < most) {
      ++count;
      if (!fits(budget)) {
        --count;
        return;
      }
    }
  }

  void smallest(int cluster) {
    p_.cluster = cluster;
    p_.stages = 2;
    p_.slots = 1;
  }

  cudaError_t choose_small_cluster(int* clusters) {
    smallest(1);
    while (p_.cluster < kSlices && activation_bytes() > kActivationBudget) smallest(2 * p_.cluster);
    if (!fits(card_.shared_bytes)) return cudaErrorInvalidConfiguration;
    return clusters_for_rows(clusters);
  }

  // A round takes the same time in clusters of every size, so the fewest rounds are fastest; of equal ones, larger
  // clusters have less to convert where there is much.
  cudaError_t choose_fewest_rounds(int* clusters) {
    int best = 0, fewest = 0;
    bool too_many = false;  // activations of a block of the best one
    for (int cluster = 1; cluster <= kSlices; cluster *= 2) {
      smallest(cluster);
      if (!fits(card_.shared_bytes)) continue;
      const cudaError_t error = clusters_for_rows(clusters);
      if (error == cudaErrorInvalidConfiguration) continue;
      if (error != cudaSuccess) return error;
      const int tiles = (p_.tiles + *clusters - 1) / *clusters;
      const int rounds = (tiles + cluster * kRowTiles - 1) / (cluster * kRowTiles);
      if (best != 0 && (rounds > fewest || (rounds == fewest && !too_many))) continue;
      best = cluster, fewest = rounds, too_many = activation_bytes() > kActivationBudget;
    }
    if (best == 0) return cudaErrorInvalidConfiguration;
    smallest(best);
    return clusters_for_rows(clusters);
  }

  // As many clusters as the card runs at once, one block an SM, and have work in the first round. What does not fit
  // would run as a second wave: the card's graphics clusters differ in their number of SMs, so it is less than the
  // number of SMs suggests.
  cudaError_t clusters_for_rows(int* clusters) const {
    // Attributes of the function and what the card makes of it, asked for once in the process; twice is harmless.
    static std::atomic<int> at_once[kSlices + 1];
    int most = at_once[p_.cluster];
    if (most == 0) {
      cudaError_t error = share_multiprocessor(kKernel);
      if (error != cudaSuccess) return error;
      error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, card_.shared_bytes);
      if (error != cudaSuccess) return error;
      most = card_.sm_count;
      if (p_.cluster > 1) {
        const LaunchShape shape = {dim3(card_.sm_count / p_.cluster * p_.cluster), kProjectionThreads,
                                   card_.shared_bytes, p_.cluster, false};
        error = with_launch_config(shape, nullptr, [&](const cudaLaunchConfig_t& config) {
          return cudaOccupancyMaxActiveClusters(&most, kKernel, &config);
        });
        if (error != cudaSuccess) return error;
      }
      if (most < 1) return cudaErrorInvalidConfiguration;
      at_once[p_.cluster] = most;
    }
    const int tiles_a_round = p_.cluster * kRowTiles;
    *clusters = min(most, (p_.tiles + tiles_a_round - 1) / tiles_a_round);
    return cudaSuccess;
  }

  ProjectionParams p_;
  const CardLimits& card_;
};

template <int kFormat, int kGroup, int kTokenTiles, int kRowTiles>
cudaError_t launch(const ProjectionParams& p, const CardLimits& card, bool dependent, cudaStream_t stream) {
  return Launcher<kFormat, kGroup, kTokenTiles, kRowTiles>(p, card).launch(dependent, stream);
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
  const LaunchShape shape = {dim3((rows * ((cols + 15) / 16) + 127) / 128), 128, 0, 1, dependent};
  return launch_kernel(sum_squares, shape, stream, static_cast<const __nv_bfloat16*>(x), sums, rows, cols);
}

}  // namespace fut
