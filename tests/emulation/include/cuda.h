// As much of the driver's header as describes matrices for the copy engine.

#pragma once

#include <cstdint>
#include <cstring>

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle {
  CU_TENSOR_MAP_SWIZZLE_32B = 1,
  CU_TENSOR_MAP_SWIZZLE_64B = 2,
  CU_TENSOR_MAP_SWIZZLE_128B = 3
};
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

struct alignas(64) CUtensorMap {
  const uint8_t* data;
  uint64_t columns, rows, stride;
  uint32_t row_bytes, box_rows, element_bytes;  // row_bytes: of a box, as many as the swizzle takes
  uint8_t rest[76];
};
static_assert(sizeof(CUtensorMap) == 128);

// Two dimensions, swizzled; refuses what the driver refuses.
inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                                       const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                       const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  const uint32_t element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
  const uint32_t row_bytes = 16u << swizzle;
  if (rank != 2 || reinterpret_cast<uintptr_t>(data) % 16 != 0 || strides[0] % 16 != 0 ||
      box[0] * element_bytes != row_bytes || box[1] > 256)
    return CUDA_ERROR_INVALID_VALUE;
  *map = {};
  map->data = static_cast<const uint8_t*>(data);
  map->columns = sizes[0];
  map->rows = sizes[1];
  map->stride = strides[0];
  map->row_bytes = row_bytes;
  map->box_rows = box[1];
  map->element_bytes = element_bytes;
  return CUDA_SUCCESS;
}
