#pragma once

namespace fut {

// Kernels run one after another here.
inline void wait_for_previous_kernel() {}
inline void let_next_kernel_start() {}

}  // namespace fut
