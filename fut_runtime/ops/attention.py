"""`prefill_attention`: causal attention of packed prompts over paged keys and values, registered with torch.library."""

from __future__ import annotations

import torch
from torch import Tensor

from fut_runtime.cuda import prefill_attention as kernel
from fut_runtime.cuda.gemm import History
from fut_runtime.cuda.prefill_attention import HEAD_DIMS, Prompts
from fut_runtime.cuda.structs import PAGE_TOKENS
from fut_runtime.errors import FutError

#: Bytes of a workspace.
prefill_attention_workspace_bytes = kernel.WORKSPACE_BYTES


def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    first_row: Tensor,
    first_position: Tensor,
    slot: Tensor,
    max_chunk: int = 0,
    workspace: Tensor | None = None,
) -> Tensor:
    """softmax(q · Kᵀ / √head_dim, causal) · V of chunks of prompts whose rows follow one another, with FP32 sums.

    Request i has rows first_row[i] to first_row[i + 1] - 1, its tokens from position first_position[i] on; each attends
    to positions 0 up to its own, which `keys` and `values` hold. The bits of a row depend on its request alone.

    Args:
        q: BF16 [rows, heads, head_dim], contiguous; head_dim 64, 80, 96 or 128.
        keys, values: BF16 [pages, kv_heads, 64, head_dim], keys after RoPE. Past a request's last token they may hold
            anything.
        page_table: int32 [slots, width], the page of tokens 64 · i and on of each slot.
        first_row: int32 [requests + 1]. first_position, slot: int32 [requests].
        max_chunk: rows of the longest chunk, or more; 0: all rows.
        workspace: uint8 of `prefill_attention_workspace_bytes`, zero before its first use and not used by two streams
            at once. Without it one is made for the call.

    Returns:
        BF16 [rows, heads, head_dim].

    Raises:
        FutError: a type or a shape is another.
    """
    _check(q, keys, values)
    if workspace is None:
        workspace = kernel.workspace(q.device)
    op = torch.ops.fut.prefill_attention
    out: Tensor = op(q, keys, values, page_table, first_row, first_position, slot, max_chunk, workspace)
    return out


@torch.library.custom_op("fut::prefill_attention", mutates_args=("workspace",))
def _prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    first_row: Tensor,
    first_position: Tensor,
    slot: Tensor,
    max_chunk: int,
    workspace: Tensor,
) -> Tensor:
    out = torch.empty_like(q)
    prompts = Prompts(first_row, first_position, slot, q.shape[0], max_chunk or q.shape[0])
    kernel.attend(q, History(keys, values, page_table), prompts, out.flatten(1), None, workspace)
    return out


@_prefill_attention.register_fake
def _(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    first_row: Tensor,
    first_position: Tensor,
    slot: Tensor,
    max_chunk: int,
    workspace: Tensor,
) -> Tensor:
    return torch.empty_like(q)


def _check(q: Tensor, keys: Tensor, values: Tensor) -> None:
    if q.dtype != torch.bfloat16 or q.dim() != 3 or q.shape[2] not in HEAD_DIMS:
        raise FutError(
            f"q is {q.dtype} {list(q.shape)}, expected torch.bfloat16 [rows, heads, head_dim] with a head_dim of "
            f"{', '.join(map(str, HEAD_DIMS))}"
        )
    for name, cache in (("keys", keys), ("values", values)):
        fits = cache.dim() == 4 and cache.shape == keys.shape and cache.shape[2:] == (PAGE_TOKENS, q.shape[2])
        if cache.dtype != torch.bfloat16 or not fits or q.shape[1] % cache.shape[1]:
            raise FutError(
                f"{name} are {cache.dtype} {list(cache.shape)}, expected torch.bfloat16 [pages, kv_heads, "
                f"{PAGE_TOKENS}, {q.shape[2]}] with a divisor of {q.shape[1]} KV heads"
            )
