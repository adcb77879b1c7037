"""FuTransformer's matrix products as PyTorch operators (`torch.ops.fut`), for a Hopper card.

They work under `torch.compile` and in CUDA graphs, run on the current stream, and have no gradients.
"""

from fut_runtime.ops.matmul import mm_bf16, mm_fp8

__all__ = ["mm_bf16", "mm_fp8"]
