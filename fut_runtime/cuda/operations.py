"""Single operations of the library on PyTorch's tensors, for tests and benchmarks.

Every function runs on the current stream of the tensors' device, with a workspace of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fut_runtime.artifact.manifest import KVCacheSpec, WeightSpec
from fut_runtime.artifact.reader import Artifact
from fut_runtime.backend import Draw
from fut_runtime.cuda.decoder import sampling_struct
from fut_runtime.cuda.library import library
from fut_runtime.cuda.memory_plan import block_bytes
from fut_runtime.cuda.structs import PAGE_TOKENS, AttentionShape, Epilogue, KVCache, Matrix, Rows, Sampling
from fut_runtime.cuda.tensors import matrix_struct
from fut_runtime.errors import FutError


@dataclass(frozen=True)
class DeviceMatrix:
    """A stored matrix on a card.

    Attributes:
        spec: how it is stored.
        weight, scale: as in the artifact.
        bias: F32 [rows], natural order, or None.
        gain: F32 [cols] that the input is multiplied by, or None.
    """

    spec: WeightSpec
    weight: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None
    gain: Tensor | None = None

    @classmethod
    def of(cls, artifact: Artifact, name: str, weight_format: str, device: torch.device | str) -> DeviceMatrix:
        """A matrix of an artifact with its bias, without a gain."""
        stored = artifact.weight(name, weight_format)
        scale = None if stored.scale is None else stored.scale.to(device)
        bias = artifact.tensor(f"{name}.bias").to(device) if artifact.has(f"{name}.bias") else None
        return cls(stored.spec, stored.data.to(device), scale, bias)

    def struct(self) -> Matrix:
        """`fut_matrix`; this object must live as long."""
        scale, bias, gain = (None if t is None else t.data_ptr() for t in (self.scale, self.bias, self.gain))
        return matrix_struct(self.spec, weight=self.weight.data_ptr(), scale=scale, bias=bias, gain=gain)


def project(
    matrix: DeviceMatrix, x: Tensor, epilogue: Epilogue = Epilogue.STORE, *, y: Tensor | None = None, eps: float = -1.0
) -> Tensor:
    """One projection.

    Args:
        x: BF16 [tokens, cols].
        epilogue: STORE gives F32 [tokens, rows]; RESIDUAL adds to y, BF16 [tokens, rows], in place; SWIGLU gives
            BF16 [tokens, rows / 2].
        eps: at least 0: x passes through an RMSNorm with this epsilon, and the matrix's gain, before the product.

    Returns:
        The result; y itself where that is added to.
    """
    rows, cols = matrix.spec.shape
    _check(x, torch.bfloat16, (x.shape[0], cols), "x")
    tokens = x.shape[0]
    if epilogue == Epilogue.STORE:
        y = torch.empty(tokens, rows, dtype=torch.float32, device=x.device)
    elif epilogue == Epilogue.SWIGLU:
        y = torch.empty(tokens, rows // 2, dtype=torch.bfloat16, device=x.device)
    elif y is None:
        raise FutError("RESIDUAL adds to y: give one")
    else:
        _check(y, torch.bfloat16, (tokens, rows), "y")
    functions, struct = library(), matrix.struct()
    # Not zeroed: that would be one more kernel between two products whose time is taken.
    workspace = _workspace(functions.fut_project_workspace_bytes(ctypes.byref(struct), tokens), x.device, zero=False)
    functions.call(
        "fut_project",
        *(ctypes.byref(struct), x.data_ptr(), y.data_ptr(), tokens, int(epilogue), eps),
        *(workspace.data_ptr(), workspace.numel(), _stream(x)),
        about=f"{matrix.spec.format} {list(matrix.spec.shape)}, {tokens} tokens",
    )
    return y


@dataclass(frozen=True)
class PagedCache:
    """A cache of pages on a card.

    Attributes:
        pool: uint8 [pages, layers, kv_heads, bytes of a block].
        spec: what it holds.
        head_dim: channels of a head.
    """

    pool: Tensor
    spec: KVCacheSpec
    head_dim: int

    @classmethod
    def empty(
        cls, spec: KVCacheSpec, *, pages: int, layers: int, kv_heads: int, head_dim: int, device: torch.device | str
    ) -> PagedCache:
        """A cache of zeros."""
        shape = (pages, layers, kv_heads, block_bytes(spec.bits, head_dim))
        return cls(torch.zeros(shape, dtype=torch.uint8, device=device), spec, head_dim)

    def struct(self) -> KVCache:
        """`fut_kv_cache`; this object must live as long."""
        pages, layers, kv_heads, _ = self.pool.shape
        return KVCache(
            pool=self.pool.data_ptr(),
            pages=pages,
            layers=layers,
            kv_heads=kv_heads,
            head_dim=self.head_dim,
            bits=self.spec.bits,
            rotation=int(self.spec.rotation),
            zero_point=int(self.spec.zero_point),
        )


def attention(
    cache: PagedCache,
    layer: int,
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    page_table: Tensor,
    rope: tuple[Tensor, Tensor],
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-5,
    chunked: bool = False,
) -> Tensor:
    """Append the rows' K and V to the cache and attend over it.

    Args:
        qkv: F32 [rows, (heads + 2 kv_heads) · head_dim], after scales and bias.
        positions, slots: int32 [rows].
        page_table: int32 [slots, width].
        rope: cosines and sines, F32 [context, head_dim / 2] each.
        q_norm, k_norm: F32 [head_dim] gains of Qwen3's norms per head, with `eps`.
        chunked: rows may be consecutive tokens of one request.

    Returns:
        BF16 [rows, heads · head_dim].
    """
    rows, width = qkv.shape
    heads = width // cache.head_dim - 2 * cache.pool.shape[2]
    _check(qkv, torch.float32, (rows, (heads + 2 * cache.pool.shape[2]) * cache.head_dim), "qkv")
    _check(positions, torch.int32, (rows,), "positions")
    _check(slots, torch.int32, (rows,), "slots")
    _check(page_table, torch.int32, tuple(page_table.shape), "page_table")
    for name, table in zip(("cosines", "sines"), rope, strict=True):
        _check(table, torch.float32, (rope[0].shape[0], cache.head_dim // 2), name)
    if page_table.shape[1] * PAGE_TOKENS < int(positions.max()) + 1 or int(positions.max()) >= rope[0].shape[0]:
        raise FutError(f"position {int(positions.max())} lies beyond the page table or the RoPE tables")
    shape = AttentionShape(
        heads=heads,
        kv_heads=cache.pool.shape[2],
        head_dim=cache.head_dim,
        max_context=rope[0].shape[0],
        rms_norm_eps=eps,
        rope_cos=rope[0].data_ptr(),
        rope_sin=rope[1].data_ptr(),
    )
    listed = Rows(
        position=positions.data_ptr(),
        slot=slots.data_ptr(),
        page_table=page_table.data_ptr(),
        table_width=page_table.shape[1],
        rows=rows,
    )
    functions = library()
    out = torch.empty(rows, heads * cache.head_dim, dtype=torch.bfloat16, device=qkv.device)
    workspace = _workspace(functions.fut_attention_workspace_bytes(ctypes.byref(shape), rows), qkv.device)
    norms = [None if norm is None else norm.data_ptr() for norm in (q_norm, k_norm)]
    functions.call(
        "fut_attention",
        *(ctypes.byref(shape), ctypes.byref(cache.struct()), layer, ctypes.byref(listed), int(chunked)),
        *(qkv.data_ptr(), *norms, out.data_ptr(), workspace.data_ptr(), workspace.numel(), _stream(qkv)),
        about=f"{heads} heads over {cache.pool.shape[2]} of {cache.head_dim}, {cache.spec.bits} bits, {rows} rows",
    )
    return out


def sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Choose a token for each row of logits, F32 [rows, vocab]: int32 [rows], -1 where a row is not finite."""
    rows, vocab = logits.shape
    _check(logits, torch.float32, (len(draws), vocab), "logits")
    listed = (Sampling * rows)(*(sampling_struct(draw) for draw in draws))
    on_device = torch.frombuffer(bytearray(bytes(listed)), dtype=torch.uint8).to(logits.device)
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    functions = library()
    workspace = _workspace(functions.fut_sample_workspace_bytes(rows, vocab), logits.device)
    functions.call(
        "fut_sample",
        *(logits.data_ptr(), on_device.data_ptr(), tokens.data_ptr(), rows, vocab),
        *(workspace.data_ptr(), workspace.numel(), _stream(logits)),
        about=f"{rows} rows of {vocab} logits",
    )
    return tokens


def _check(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], name: str) -> None:
    """A kernel would read whatever lies there; so look first."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous() or not tensor.is_cuda:
        raise FutError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, expected contiguous {dtype} "
            f"{list(shape)} on a card"
        )


def _workspace(nbytes: int, device: torch.device, *, zero: bool = True) -> Tensor:
    make = torch.zeros if zero else torch.empty
    return make(max(int(nbytes), 16), dtype=torch.uint8, device=device)


def _stream(tensor: Tensor) -> int:
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)
