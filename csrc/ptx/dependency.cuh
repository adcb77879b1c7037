// Programmatic dependent launch: a kernel may start while the one before it still runs (PTX ISA, griddepcontrol).

#pragma once

namespace fut {

// Blocks until every kernel this one depends on has finished and its writes are visible. Nothing the kernel before
// wrote may be read, and nothing it reads may be written, above this line; weights may. The clobber keeps the compiler
// from moving loads across.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel start as soon as every block has said so or ended.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace fut
