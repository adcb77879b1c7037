"""Products of many rows, and what prefill does with them in the same kernel, on PyTorch's tensors.

Everywhere: A [m, k] and B [n, k] are row-major and both E4M3 or both BF16, on one card, with rows a multiple of 16
bytes apart (`padded_empty` makes such tensors of any width). A value that an epilogue sees is

    sum · (row_factor · ρ · a_scale) · channel_scale + bias,   ρ = 1 / sqrt(sum(square_sums) / k + eps)

in FP32, whatever is not given left out. See docs/numerics.md.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from fut_runtime.cuda.library import library
from fut_runtime.cuda.structs import (
    PAGE_TOKENS,
    Accumulation,
    AttentionShape,
    E4M3Output,
    Format,
    GemmCall,
    GemmEpilogue,
    GemmTile,
    QKVOutput,
    Rows,
)
from fut_runtime.errors import FutError

E4M3 = torch.float8_e4m3fn
_FORMATS = {E4M3: Format.E4M3, torch.bfloat16: Format.BF16}
#: Addresses, and strides between rows, that the copy engine takes are multiples of so many bytes.
ALIGN_BYTES = 16
#: Columns whose squares one partial sum adds: `kSquareColumns`.
SQUARE_COLUMNS = 128


@dataclass(frozen=True)
class Scales:
    """Factors of a product's rows and columns, all FP32 and contiguous; None leaves one out.

    Attributes:
        row_factor: [m].
        square_sums: [m, parts], partial sums of squares of A's rows before quantisation; with `eps`, RMSNorm's ρ.
        a: [requests], the scale of A.
        row_request: int32 [m], the request of each row; None: all belong to request 0.
        channel: [n].
        bias: [n], in the order of B's rows.
    """

    row_factor: Tensor | None = None
    square_sums: Tensor | None = None
    eps: float = 0.0
    a: Tensor | None = None
    row_request: Tensor | None = None
    channel: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True)
class Tuning:
    """How a product is computed.

    Attributes:
        accumulation: of E4M3 sums.
        tile_n, cluster: the tile's columns (256 or 128) and CTAs of a cluster (1 or 2); 0: the cost model chooses.
    """

    accumulation: Accumulation = Accumulation.FAST
    tile_n: int = 0
    cluster: int = 0


UNSCALED = Scales()
CHOSEN = Tuning()


@dataclass(frozen=True)
class Quantized:
    """Where an epilogue puts E4M3 values, x / scale, and what it records.

    Attributes:
        data: E4M3 [m, columns].
        scale: F32 [requests].
        amax: F32 [requests], raised to the largest |x| of each request (NaN is larger than all); or None.
        saturated: int64 [1], raised by the number of elements beyond ±448; or None.
    """

    data: Tensor
    scale: Tensor
    amax: Tensor | None = None
    saturated: Tensor | None = None

    def struct(self) -> E4M3Output:
        """`fut_e4m3_output`; this object must live as long."""
        return E4M3Output(
            self.data.data_ptr(),
            self.data.stride(0),
            pointer(self.scale),
            pointer(self.amax),
            pointer(self.saturated),
        )


@dataclass(frozen=True)
class History:
    """K (after RoPE) and V of one layer for prompts that are not complete yet.

    Attributes:
        keys, values: BF16 [pages, kv_heads, PAGE_TOKENS, head_dim].
        page_table: int32 [slots, width], the page of tokens PAGE_TOKENS · i and on of each slot's request.
    """

    keys: Tensor
    values: Tensor
    page_table: Tensor

    @classmethod
    def empty(cls, page_table: Tensor, pages: int, kv_heads: int, head_dim: int) -> History:
        """A history of NaN, so that what was never written shows."""
        shape = (pages, kv_heads, PAGE_TOKENS, head_dim)
        keys, values = (torch.full(shape, torch.nan, dtype=torch.bfloat16, device=page_table.device) for _ in range(2))
        return cls(keys, values, page_table)


def padded_empty(rows: int, columns: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A matrix [rows, columns] whose rows are a multiple of ALIGN_BYTES apart."""
    step = ALIGN_BYTES // dtype.itemsize
    return torch.empty(rows, -(-columns // step) * step, dtype=dtype, device=device)[:, :columns]


def plan(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    multiprocessors: int,
    accumulation: Accumulation = Accumulation.FAST,
    head_dim: int = 0,
) -> GemmTile:
    """What the cost model chooses for a product (of `qkv` with a head_dim); needs no card."""
    tile = GemmTile()
    library().call(
        "fut_gemm_plan", m, n, k, _FORMATS[dtype], accumulation, head_dim, multiprocessors, ctypes.byref(tile)
    )
    return tile


def store(a: Tensor, b: Tensor, out: Tensor, scales: Scales = UNSCALED, tuning: Tuning = CHOSEN) -> None:
    """out ← the product, BF16 or F32 [m, n]."""
    epilogues = {torch.bfloat16: GemmEpilogue.BF16, torch.float32: GemmEpilogue.F32}
    if out.dtype not in epilogues:
        raise FutError(f"out is {out.dtype}, expected torch.bfloat16 or torch.float32")
    check_matrix(out, out.dtype, (a.shape[0], b.shape[0]), "out")
    call = _call(a, b, scales, tuning, epilogues[out.dtype])
    call.out, call.out_stride = out.data_ptr(), out.stride(0)
    _run(call, a, b)


def add_residual(
    a: Tensor,
    b: Tensor,
    h: Tensor,
    quantized: Quantized | None = None,
    square_sums: Tensor | None = None,
    scales: Scales = UNSCALED,
    tuning: Tuning = CHOSEN,
) -> None:
    """h ← bf16(h + product), in place, h BF16 [m, n]; a copy in E4M3, and sums of squares of the new h.

    Args:
        square_sums: F32 [m, ceil(n / SQUARE_COLUMNS)], or None.
    """
    call = _call(a, b, scales, tuning, GemmEpilogue.RESIDUAL)
    check_matrix(h, torch.bfloat16, (a.shape[0], b.shape[0]), "h")
    call.out = call.residual = h.data_ptr()
    call.out_stride = call.residual_stride = h.stride(0)
    if quantized is not None:
        check_matrix(quantized.data, E4M3, tuple(h.shape), "the E4M3 copy")
        call.quantized = quantized.struct()
    if square_sums is not None:
        check_matrix(
            square_sums, torch.float32, (a.shape[0], -(-b.shape[0] // SQUARE_COLUMNS)), "square_sums", dense=True
        )
        call.out_square_sums = square_sums.data_ptr()
    _run(call, a, b)


def swiglu(
    a: Tensor,
    b: Tensor,
    quantized: Quantized,
    scales: Scales = UNSCALED,
    tuning: Tuning = CHOSEN,
) -> None:
    """quantized ← silu(gate) · up, E4M3 [m, n / 2]; rows of B are gate and up in turn ("interleave1")."""
    call = _call(a, b, scales, tuning, GemmEpilogue.SWIGLU)
    check_matrix(quantized.data, E4M3, (a.shape[0], b.shape[0] // 2), "the output")
    call.quantized = quantized.struct()
    _run(call, a, b)


def swiglu_bf16(a: Tensor, b: Tensor, out: Tensor, scales: Scales = UNSCALED, tuning: Tuning = CHOSEN) -> None:
    """out ← silu(gate) · up, BF16 [m, n / 2]; rows of B as for `swiglu`."""
    call = _call(a, b, scales, tuning, GemmEpilogue.SWIGLU_BF16)
    check_matrix(out, torch.bfloat16, (a.shape[0], b.shape[0] // 2), "out")
    call.out, call.out_stride = out.data_ptr(), out.stride(0)
    _run(call, a, b)


def qkv(
    a: Tensor,
    b: Tensor,
    history: History,
    positions: Tensor,
    slots: Tensor,
    rope: tuple[Tensor, Tensor],
    *,
    norms: tuple[Tensor, Tensor] | None = None,
    norm_eps: float = 1e-6,
    scales: Scales = UNSCALED,
    tuning: Tuning = CHOSEN,
) -> Tensor:
    """Q, K and V: q/k norm, RoPE, rounding to BF16; K and V go into the history.

    Args:
        positions, slots: int32 [m], of each row's token.
        rope: cosines and sines, F32 [positions, head_dim / 2] each.
        norms: F32 [head_dim] gains of Qwen3's norms of q and k.

    Returns:
        Q, BF16 [m, heads, head_dim].
    """
    m, (_, kv_heads, _, head_dim) = a.shape[0], history.keys.shape
    heads = b.shape[0] // head_dim - 2 * kv_heads
    for name, vector in (("positions", positions), ("slots", slots)):
        check_matrix(vector, torch.int32, (m,), name, dense=True)
    for name, table in zip(("cosines", "sines"), rope, strict=True):
        check_matrix(table, torch.float32, (rope[0].shape[0], head_dim // 2), name, dense=True)
    q = torch.empty(m, heads, head_dim, dtype=torch.bfloat16, device=a.device)
    rows = Rows(
        position=positions.data_ptr(),
        slot=slots.data_ptr(),
        page_table=history.page_table.data_ptr(),
        table_width=history.page_table.shape[1],
        rows=m,
    )
    shape = AttentionShape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_context=rope[0].shape[0],
        rms_norm_eps=norm_eps,
        rope_cos=rope[0].data_ptr(),
        rope_sin=rope[1].data_ptr(),
    )
    q_norm, k_norm = norms if norms is not None else (None, None)
    out = QKVOutput(
        q=q.data_ptr(),
        k=history.keys.data_ptr(),
        v=history.values.data_ptr(),
        rows=rows,
        q_norm=pointer(q_norm),
        k_norm=pointer(k_norm),
        shape=shape,
    )
    call = _call(a, b, scales, tuning, GemmEpilogue.QKV)
    call.qkv = ctypes.pointer(out)
    _run(call, a, b)
    return q


def _call(a: Tensor, b: Tensor, scales: Scales, tuning: Tuning, epilogue: GemmEpilogue) -> GemmCall:
    if a.dtype not in _FORMATS:
        raise FutError(f"a is {a.dtype}, expected {' or '.join(map(str, _FORMATS))}")
    m, k = a.shape
    n = b.shape[0]
    check_matrix(a, a.dtype, (m, k), "a")
    check_matrix(b, a.dtype, (n, k), "b")
    parts = scales.square_sums.shape[1] if scales.square_sums is not None else 0
    requests = scales.a.shape[0] if scales.a is not None else 0
    for name, vector, dtype, size in (
        ("row_factor", scales.row_factor, torch.float32, (m,)),
        ("square_sums", scales.square_sums, torch.float32, (m, parts)),
        ("the scale of a", scales.a, torch.float32, (requests,)),
        ("row_request", scales.row_request, torch.int32, (m,)),
        ("channel", scales.channel, torch.float32, (n,)),
        ("bias", scales.bias, torch.float32, (n,)),
    ):
        if vector is not None:
            check_matrix(vector, dtype, size, name, dense=True)
    return GemmCall(
        a=a.data_ptr(),
        b=b.data_ptr(),
        a_stride=a.stride(0),
        b_stride=b.stride(0),
        m=m,
        n=n,
        k=k,
        format=_FORMATS[a.dtype],
        accumulation=tuning.accumulation if a.dtype == E4M3 else Accumulation.FAST,
        epilogue=epilogue,
        row_factor=pointer(scales.row_factor),
        square_sums=pointer(scales.square_sums),
        square_parts=parts,
        eps=scales.eps,
        a_scale=pointer(scales.a),
        row_request=pointer(scales.row_request),
        channel_scale=pointer(scales.channel),
        bias=pointer(scales.bias),
        tile_n=tuning.tile_n,
        cluster=tuning.cluster,
    )


def _run(call: GemmCall, a: Tensor, b: Tensor) -> None:
    stream = int(torch.cuda.current_stream(a.device).cuda_stream)
    library().call(
        "fut_gemm", ctypes.byref(call), stream, about=f"{a.dtype} {list(a.shape)} times {list(b.shape)} transposed"
    )


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def check_matrix(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], name: str, *, dense: bool = False) -> None:
    """A kernel would read whatever lies there; so look first. Alignment is checked where the pointers enter C++."""
    rows_in_a_row = tensor.is_contiguous() if dense else tensor.dim() == 2 and tensor.stride(1) == 1
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not rows_in_a_row or not tensor.is_cuda:
        kind = "contiguous" if dense else "row-major"
        raise FutError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}, "
            f"expected {kind} {dtype} {list(shape)} on a card"
        )
