"""`mm_bf16_fp8` and `mm_fp16_fp8`: 16-bit activations times E4M3 weights, registered with torch.library."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fut_runtime.cuda import w8a16
from fut_runtime.cuda.gemm import padded_empty
from fut_runtime.cuda.w8a16 import W8A16Plan
from fut_runtime.errors import FutError

#: A tactic is tokens of a tile, then the number of parts of k below; this much more where warpgroups take turns.
_TACTIC_BASE = 100
_PING_PONG = 100_000


def mm_bf16_fp8(
    a: Tensor,
    b: Tensor,
    alpha: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    tactic: int = 0,
    workspace: Tensor | None = None,
) -> Tensor:
    """alpha · (a · bᵀ) + bias, a BF16 [m, k], b E4M3 [n, k].

    The weights are converted in registers; alpha multiplies the FP32 sums, never the weights. The bits of a row depend
    on the tactic alone.

    Args:
        a, b: row-major with rows a multiple of 16 bytes apart, on one card.
        alpha: F32, one or [n]. bias: F32 [n].
        out_dtype: torch.bfloat16 (where None) or torch.float32.
        out: [m, n], rows a multiple of 16 bytes apart, to write into.
        tactic: 100 · tokens of a tile (16 to 256) + parts of k (1 to 16), of the tile of 128 channels that two
            warpgroups share; 100,000 more for that of 64 channels (and at most 64 tokens) at which they take turns.
            0: the cost model chooses.
        workspace: uint8, `mm_bf16_fp8_workspace_bytes` or more, zero before its first use and not used by two streams
            at once. Without it one is made for the call.

    Raises:
        FutError: a type, a shape or a tactic is another.
        CudaCallError: an address or a stride is no multiple of 16 bytes, or the workspace is too small.
    """
    return _product(a, b, alpha, bias, out_dtype, out, tactic, workspace, torch.bfloat16)


def mm_fp16_fp8(
    a: Tensor,
    b: Tensor,
    alpha: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    tactic: int = 0,
    workspace: Tensor | None = None,
) -> Tensor:
    """The same for FP16 activations; out_dtype is torch.float16 where None."""
    return _product(a, b, alpha, bias, out_dtype, out, tactic, workspace, torch.float16)


def mm_bf16_fp8_workspace_bytes(m: int, n: int, k: int, tactic: int = 0, device: int | None = None) -> int:
    """Bytes of the workspace of a product on a card (the current one)."""
    device = torch.cuda.current_device() if device is None else device
    return _plan(m, n, k, tactic, _multiprocessors(device)).workspace_bytes


mm_fp16_fp8_workspace_bytes = mm_bf16_fp8_workspace_bytes


@torch.library.custom_op("fut::w8a16", mutates_args=("out", "workspace"))
def _w8a16(
    a: Tensor, b: Tensor, alpha: Tensor, bias: Tensor | None, out: Tensor, tactic: int, workspace: Tensor | None
) -> None:
    _run(a, b, alpha, bias, out, tactic, workspace)


def _run(
    a: Tensor, b: Tensor, alpha: Tensor, bias: Tensor | None, out: Tensor, tactic: int, workspace: Tensor | None
) -> None:
    chosen = _plan(a.shape[0], b.shape[0], a.shape[1], tactic, _multiprocessors(a.device.index or 0))
    w8a16.multiply(a, b, alpha, bias, out, chosen, workspace)


@_w8a16.register_fake
def _(
    a: Tensor, b: Tensor, alpha: Tensor, bias: Tensor | None, out: Tensor, tactic: int, workspace: Tensor | None
) -> None:
    return None


def _product(
    a: Tensor,
    b: Tensor,
    alpha: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    tactic: int,
    workspace: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    if a.dtype != dtype or a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise FutError(
            f"a is {a.dtype} {list(a.shape)} and b {b.dtype} {list(b.shape)}, expected {dtype} [m, k] and E4M3 [n, k]"
        )
    if out is None:
        out = padded_empty(a.shape[0], b.shape[0], out_dtype or dtype, a.device)
    elif out_dtype is not None and out.dtype != out_dtype:
        raise FutError(f"out is {out.dtype}, but out_dtype {out_dtype}")
    if workspace is None:
        chosen = _plan(a.shape[0], b.shape[0], a.shape[1], tactic, _multiprocessors(a.device.index or 0))
        if chosen.workspace_bytes:
            workspace = torch.zeros(chosen.workspace_bytes, dtype=torch.uint8, device=a.device)
    if torch.compiler.is_compiling():
        torch.ops.fut.w8a16(a, b, alpha, bias, out, tactic, workspace)
    else:
        # PyTorch's dispatch of an operator in Python takes longer than all the rest.
        _run(a, b, alpha, bias, out, tactic, workspace)
    return out


@lru_cache(maxsize=4096)
def _plan(m: int, n: int, k: int, tactic: int, multiprocessors: int) -> W8A16Plan:
    if not tactic:
        return w8a16.plan(m, n, k, multiprocessors)
    ping_pong, rest = divmod(tactic, _PING_PONG)
    tokens, splits = divmod(rest, _TACTIC_BASE)
    known = (16, 32, 64) if ping_pong else (16, 32, 64, 128, 256)
    if ping_pong not in (0, 1) or tokens not in known or not 1 <= splits <= 16:
        raise FutError(
            f"tactic {tactic} is none: 100 times 16, 32, 64, 128 or 256, and 1 to 16 more; 100,000 more up to 64"
        )
    return w8a16.plan(m, n, k, multiprocessors, 64 if ping_pong else 128, tokens, splits)


@lru_cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
