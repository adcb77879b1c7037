"""E4M3 weights times BF16 or FP16 activations, on PyTorch's tensors: the weights are widened in registers only."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from fut_runtime.cuda.gemm import E4M3, check_matrix
from fut_runtime.cuda.library import library
from fut_runtime.cuda.structs import W8A16Call, W8A16Tile
from fut_runtime.errors import FutError

#: Calls without addresses, by all that they depend on; dropped when there are too many.
_calls: dict[tuple[object, ...], W8A16Call] = {}
_MOST_CALLS = 4096


@dataclass(frozen=True)
class W8A16Plan:
    """How a product is spread over the card.

    Attributes:
        channels: of a tile: 128, shared by two warpgroups, or 64, at which they take turns.
        tokens: of a tile: 16, 32, 64, or of 128 channels also 128 or 256.
        splits: parts of k that are summed apart, 1 to 16.
        workspace_bytes: what the sums of the parts take.
    """

    channels: int
    tokens: int
    splits: int
    workspace_bytes: int


def plan(
    m: int, n: int, k: int, multiprocessors: int, channels: int = 0, tokens: int = 0, splits: int = 0
) -> W8A16Plan:
    """What the cost model chooses, or the workspace of what is asked for; needs no card.

    Raises:
        CudaCallError: there is no such tile, or k cannot be split so often.
    """
    tile, nbytes = W8A16Tile(channels, tokens, splits), ctypes.c_int64()
    library().call("fut_w8a16_plan", m, n, k, multiprocessors, ctypes.byref(tile), ctypes.byref(nbytes))
    return W8A16Plan(tile.channels, tile.tokens, tile.splits, nbytes.value)


def multiply(
    a: Tensor, b: Tensor, alpha: Tensor, bias: Tensor | None, out: Tensor, chosen: W8A16Plan, workspace: Tensor | None
) -> None:
    """out ← alpha · (a · bᵀ) + bias.

    Args:
        a: BF16 or FP16 [m, k]. b: E4M3 [n, k]. out: a's type or F32 [m, n].
        alpha: F32 [1] or [n]. bias: F32 [n].
        workspace: uint8 of `chosen.workspace_bytes` or more, zero before its first use; None where that is 0.
    """
    # Looking at every tensor and filling the call take longer than the launch: once for tensors of a kind.
    signature = (chosen, *map(_kind, (a, b, alpha, bias, out, workspace)))
    known = _calls.get(signature)
    if known is None:
        known = _checked_call(a, b, alpha, bias, out, chosen, workspace)
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        _calls[signature] = known
    call = W8A16Call.from_buffer_copy(known)
    call.a, call.b, call.alpha, call.out = a.data_ptr(), b.data_ptr(), alpha.data_ptr(), out.data_ptr()
    if bias is not None:
        call.bias = bias.data_ptr()
    if workspace is not None:
        call.workspace = workspace.data_ptr()
    _run(call, a)


def _kind(tensor: Tensor | None) -> tuple[object, ...] | None:
    """All that a call depends on but the address."""
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride(), tensor.device)


def _checked_call(
    a: Tensor, b: Tensor, alpha: Tensor, bias: Tensor | None, out: Tensor, chosen: W8A16Plan, workspace: Tensor | None
) -> W8A16Call:
    """The call without addresses."""
    if a.dtype not in (torch.bfloat16, torch.float16):
        raise FutError(f"a is {a.dtype}, expected torch.bfloat16 or torch.float16")
    if out.dtype not in (a.dtype, torch.float32):
        raise FutError(f"out is {out.dtype}, expected {a.dtype} or torch.float32")
    m, k = a.shape
    n = b.shape[0]
    check_matrix(a, a.dtype, (m, k), "a")
    check_matrix(b, E4M3, (n, k), "b")
    check_matrix(out, out.dtype, (m, n), "out")
    if alpha.numel() not in (1, n):
        raise FutError(f"alpha has {alpha.numel()} elements, expected 1 or {n}")
    check_matrix(alpha, torch.float32, tuple(alpha.shape), "alpha", dense=True)
    if bias is not None:
        check_matrix(bias, torch.float32, (n,), "bias", dense=True)
    if workspace is not None:
        check_matrix(workspace, torch.uint8, (workspace.numel(),), "workspace", dense=True)
    return W8A16Call(
        workspace_bytes=0 if workspace is None else workspace.numel(),
        a_stride=a.stride(0),
        b_stride=b.stride(0),
        out_stride=out.stride(0),
        m=m,
        n=n,
        k=k,
        is_fp16=a.dtype == torch.float16,
        out_is_f32=out.dtype == torch.float32,
        alpha_is_vector=alpha.numel() > 1,
        tile=W8A16Tile(chosen.channels, chosen.tokens, chosen.splits),
    )


def _run(call: W8A16Call, a: Tensor) -> None:
    stream = int(torch.cuda.current_stream(a.device).cuda_stream)
    library().call(
        "fut_w8a16",
        ctypes.byref(call),
        stream,
        about=lambda: f"{a.dtype} [{call.m}, {call.k}] times E4M3 [{call.n}, {call.k}] transposed",
    )
