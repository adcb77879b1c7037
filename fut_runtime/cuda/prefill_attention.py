"""Attention of packed prompts over the paged BF16 history, on PyTorch's tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fut_runtime.cuda.gemm import E4M3, History, Quantized, check_matrix
from fut_runtime.cuda.library import library
from fut_runtime.cuda.structs import PAGE_TOKENS, AttentionShape, E4M3Output, PrefillAttentionCall
from fut_runtime.cuda.structs import Prompts as PromptsStruct
from fut_runtime.errors import FutError

HEAD_DIMS = (64, 80, 96, 128)
#: What a workspace takes, whatever the call: `fut_prefill_attention_workspace_bytes`.
WORKSPACE_BYTES = 256


@dataclass(frozen=True)
class Prompts:
    """Chunks of prompts whose rows follow one another.

    Attributes:
        first_row: int32 [requests + 1], the first row of each chunk, and the number of rows.
        first_position: int32 [requests], tokens of each request before its chunk.
        slot: int32 [requests], the row of the page table of each.
        rows: of all chunks.
        max_chunk: rows of the longest.
    """

    first_row: Tensor
    first_position: Tensor
    slot: Tensor
    rows: int
    max_chunk: int

    @classmethod
    def of(cls, chunks: Sequence[tuple[int, int]], slots: Sequence[int], device: torch.device | str) -> Prompts:
        """From the first position and the number of tokens of each chunk."""
        tokens = [count for _, count in chunks]
        first = torch.tensor([0, *tokens]).cumsum(0).to(torch.int32)
        positions = torch.tensor([position for position, _ in chunks], dtype=torch.int32)
        slot = torch.tensor(slots, dtype=torch.int32)
        return cls(first.to(device), positions.to(device), slot.to(device), sum(tokens), max(tokens))


def workspace(device: torch.device | str) -> Tensor:
    """For any number of calls, one at a time."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def attend(
    q: Tensor, history: History, prompts: Prompts, out: Tensor | None, quantized: Quantized | None, workspace: Tensor
) -> None:
    """Causal attention of every row to its request's positions up to its own, into `out`, `quantized`, or both.

    Args:
        q: BF16 [rows, heads, head_dim], contiguous.
        history: with K and V of the chunks in it already; what it holds past a request's last token is not seen.
        out: BF16 [rows, heads · head_dim], rows a multiple of 16 bytes apart.
        quantized: the same in E4M3, with a scale, a maximum and a count as for products.
        workspace: of `workspace()`.

    Raises:
        FutError: a type or a shape is another.
        CudaCallError: a head_dim has no kernel, or an address or a stride is no multiple of 16 bytes.
    """
    rows, heads, head_dim = q.shape
    pages, kv_heads, _, _ = history.keys.shape
    requests = prompts.slot.shape[0]
    check_matrix(q, torch.bfloat16, (prompts.rows, heads, head_dim), "q", dense=True)
    for name, cache in (("keys", history.keys), ("values", history.values)):
        check_matrix(cache, torch.bfloat16, (pages, kv_heads, PAGE_TOKENS, head_dim), name, dense=True)
    check_matrix(history.page_table, torch.int32, tuple(history.page_table.shape), "page_table", dense=True)
    for name, vector, size in (
        ("first_row", prompts.first_row, requests + 1),
        ("first_position", prompts.first_position, requests),
        ("slot", prompts.slot, requests),
    ):
        check_matrix(vector, torch.int32, (size,), name, dense=True)
    call = PrefillAttentionCall(
        q=q.data_ptr(),
        k=history.keys.data_ptr(),
        v=history.values.data_ptr(),
        pages=pages,
        prompts=PromptsStruct(
            first_row=prompts.first_row.data_ptr(),
            first_position=prompts.first_position.data_ptr(),
            slot=prompts.slot.data_ptr(),
            page_table=history.page_table.data_ptr(),
            table_width=history.page_table.shape[1],
            requests=requests,
            rows=rows,
            max_chunk=prompts.max_chunk,
        ),
        shape=AttentionShape(heads=heads, kv_heads=kv_heads, head_dim=head_dim),
        quantized=E4M3Output() if quantized is None else quantized.struct(),
        workspace=workspace.data_ptr(),
        workspace_bytes=workspace.numel() * workspace.element_size(),
    )
    if out is not None:
        check_matrix(out, torch.bfloat16, (rows, heads * head_dim), "out")
        call.out, call.out_stride = out.data_ptr(), out.stride(0)
    if quantized is not None:
        check_matrix(quantized.data, E4M3, (rows, heads * head_dim), "the E4M3 output")
        check_matrix(quantized.scale, torch.float32, (requests,), "the scales", dense=True)
    if out is None and quantized is None:
        raise FutError("attention has neither a BF16 nor an E4M3 output")
    _run(call, q)


def _run(call: PrefillAttentionCall, q: Tensor) -> None:
    stream = int(torch.cuda.current_stream(q.device).cuda_stream)
    about = f"q {list(q.shape)}, {call.shape.kv_heads} KV heads, {call.prompts.requests} requests"
    library().call("fut_prefill_attention", ctypes.byref(call), stream, about=about)
