"""FuTransformer's matrix products and attention as PyTorch operators (`torch.ops.fut`), for a Hopper card.

They work under `torch.compile` and in CUDA graphs, run on the current stream, and have no gradients.
"""

from fut_runtime.ops.attention import prefill_attention, prefill_attention_workspace_bytes
from fut_runtime.ops.matmul import mm_bf16, mm_fp8
from fut_runtime.ops.w8a16 import (
    mm_bf16_fp8,
    mm_bf16_fp8_workspace_bytes,
    mm_fp16_fp8,
    mm_fp16_fp8_workspace_bytes,
)

__all__ = [
    "mm_bf16",
    "mm_bf16_fp8",
    "mm_bf16_fp8_workspace_bytes",
    "mm_fp8",
    "mm_fp16_fp8",
    "mm_fp16_fp8_workspace_bytes",
    "prefill_attention",
    "prefill_attention_workspace_bytes",
]
