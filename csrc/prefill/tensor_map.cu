#include <atomic>

#include "../host/error.h"
#include "tensor_map.h"

namespace fut {

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, found at run time: the library does not link to libcuda, which is missing where there is no
// card.
fut_status encoder(Encode* encode) {
  static std::atomic<Encode> known{nullptr};
  *encode = known.load(std::memory_order_acquire);
  if (*encode != nullptr) return FUT_OK;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  FUT_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
  if (result != cudaDriverEntryPointSuccess || found == nullptr)
    return fail(FUT_CUDA, "the driver has no cuTensorMapEncodeTiled: it is older than CUDA 12");
  *encode = reinterpret_cast<Encode>(found);
  known.store(*encode, std::memory_order_release);
  return FUT_OK;
}

CUtensorMapSwizzle swizzle_of(int row_bytes) {
  if (row_bytes == 128) return CU_TENSOR_MAP_SWIZZLE_128B;
  return row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_32B;
}

}  // namespace

fut_status check_view(const MatrixView& view, int element_bytes) {
  const auto refuse = [&](const char* what, int64_t found) {
    return fail(FUT_INVALID, "%s [%lld, %lld]: its %s is %lld, expected a multiple of 16 bytes", view.name,
                static_cast<long long>(view.rows), static_cast<long long>(view.columns), what,
                static_cast<long long>(found));
  };
  if (view.data == nullptr) return fail(FUT_INVALID, "%s is null", view.name);
  const auto address = reinterpret_cast<uintptr_t>(view.data);
  if (address % 16 != 0) return refuse("address", static_cast<int64_t>(address));
  if (view.stride_bytes % 16 != 0) return refuse("stride between rows", view.stride_bytes);
  if (view.stride_bytes < view.columns * element_bytes)
    return fail(FUT_INVALID, "%s [%lld, %lld]: its rows are %lld bytes apart, less than they are long", view.name,
                static_cast<long long>(view.rows), static_cast<long long>(view.columns),
                static_cast<long long>(view.stride_bytes));
  return FUT_OK;
}

fut_status describe_operand(const MatrixView& view, int element_bytes, int box_rows, int row_bytes, CUtensorMap* map) {
  const fut_status checked = check_view(view, element_bytes);
  if (checked != FUT_OK) return checked;
  Encode encode;
  const fut_status found = encoder(&encode);
  if (found != FUT_OK) return found;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(view.columns), static_cast<cuuint64_t>(view.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(view.stride_bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(row_bytes / element_bytes), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      encode(map, element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
             const_cast<void*>(view.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzle_of(row_bytes), CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    return fail(FUT_CUDA, "cuTensorMapEncodeTiled of %s [%lld, %lld] failed with %d", view.name,
                static_cast<long long>(view.rows), static_cast<long long>(view.columns), static_cast<int>(result));
  return FUT_OK;
}

}  // namespace fut
