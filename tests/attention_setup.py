"""A paged cache with requests in it, the kernel's attention over it, and the reference backend's."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fut_runtime.artifact.manifest import KVCacheSpec
from fut_runtime.cuda.library import Library, library
from fut_runtime.cuda.structs import AttentionShape, KVCache, Rows
from fut_runtime.reference.attention import attend, attend_quantized
from fut_runtime.reference.kv_quant import QuantizedHeads, quantize_heads
from fut_runtime.reference.layer import head_norm
from fut_runtime.reference.numerics import EXACT
from fut_runtime.reference.rope import apply_rope
from fut_runtime.reference.rotation import sylvester_hadamard
from kv_blocks import PAGE_TOKENS, block_bytes, pack_bf16, pack_int4, unpack_bf16, unpack_int4

EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """Heads of a model, and how its cache is kept."""

    heads: int
    kv_heads: int
    head_dim: int
    bits: int = 4
    rotation: bool = True
    zero_point: bool = True
    norms: bool = False

    @property
    def spec(self) -> KVCacheSpec:
        return KVCacheSpec(self.bits, self.rotation, self.zero_point)

    @property
    def signs(self) -> Tensor:
        return sylvester_hadamard(self.head_dim & -self.head_dim)

    @property
    def channels(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass
class Request:
    """Keys and values of the tokens before the newest, as the cache keeps them: quantised, or BF16 [tokens, ...]."""

    past: int
    keys: QuantizedHeads | Tensor
    values: QuantizedHeads | Tensor


@dataclass
class Step:
    """Inputs of a launch, all on one device, and what belongs to each row. Whatever nobody wrote is NaN."""

    shape: Shape
    requests: list[Request]
    request_of_row: list[int]
    layers: int
    layer: int
    max_context: int
    pool: Tensor
    page_table: Tensor
    position: Tensor
    slot: Tensor
    qkv: Tensor
    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    functions: Library
    workspace: Tensor = field(init=False)

    def __post_init__(self) -> None:
        size = self.functions.fut_attention_workspace_bytes(self._attention_shape(), 64)
        # The library asks for 256 bytes of alignment, which host memory may lack.
        raw = torch.zeros(size + 256, dtype=torch.uint8, device=self.device)
        self.workspace = raw[-raw.data_ptr() % 256 :][:size]

    @property
    def device(self) -> torch.device:
        return self.pool.device

    def _attention_shape(self) -> AttentionShape:
        s = self.shape
        tables = self.cos.data_ptr(), self.sin.data_ptr()
        return AttentionShape(s.heads, s.kv_heads, s.head_dim, self.max_context, EPS, *tables)

    def run(self, rows: list[int] | None = None, chunked: bool = False) -> Tensor:
        """Attention of some rows (default all): BF16 [rows, heads · head_dim]. Appends to the pool."""
        s = self.shape
        chosen = torch.tensor(range(len(self.request_of_row)) if rows is None else rows, device=self.device)
        qkv, position, slot = (t[chosen].contiguous() for t in (self.qkv, self.position, self.slot))
        out = torch.full((len(chosen), s.heads * s.head_dim), torch.nan, dtype=torch.bfloat16, device=self.device)
        pages = self.pool.numel() // (self.layers * s.kv_heads * block_bytes(s.bits, s.head_dim))
        cache = KVCache(
            self.pool.data_ptr(), pages, self.layers, s.kv_heads, s.head_dim, s.bits, s.rotation, s.zero_point
        )
        table = self.page_table
        given = Rows(None, position.data_ptr(), slot.data_ptr(), table.data_ptr(), table.shape[1], len(chosen))
        norms = (n.data_ptr() if n is not None else None for n in (self.q_norm, self.k_norm))
        stream = torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else None
        self.functions.call(
            "fut_attention",
            *(self._attention_shape(), cache, self.layer, given, int(chunked), qkv.data_ptr(), *norms),
            *(out.data_ptr(), self.workspace.data_ptr(), self.workspace.numel()),
            stream,
        )
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return out

    def expected(self) -> Tensor:
        """The reference backend's output, FP32 [rows, heads · head_dim]; rows of one request follow one another."""
        s, outputs = self.shape, []
        signs = s.signs.to(self.device)
        histories = [(r.keys, r.values) for r in self.requests]
        for row, request in enumerate(self.request_of_row):
            q, k, v = self.heads_of(row)
            keys, values = histories[request]
            if isinstance(keys, QuantizedHeads) and isinstance(values, QuantizedHeads):
                keys, values = (
                    _joined(old, quantize_heads(EXACT.round16(new), s.spec, signs))
                    for old, new in ((keys, k), (values, v))
                )
                outputs.append(attend_quantized(q, keys, values, s.spec, signs, EXACT))
            else:
                keys, values = torch.cat((keys, k.bfloat16())), torch.cat((values, v.bfloat16()))
                outputs.append(attend(EXACT.round16(q), keys, values, EXACT))
            histories[request] = keys, values
        return torch.cat(outputs).flatten(1)

    def heads_of(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, key and value of a row after norm and RoPE, FP32 [1, heads, head_dim]."""
        s, position = self.shape, int(self.position[row])
        q, k, v = self.qkv[row : row + 1].unflatten(-1, (-1, s.head_dim)).split((s.heads, s.kv_heads, s.kv_heads), 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = head_norm(q, self.q_norm, EPS), head_norm(k, self.k_norm, EPS)
        turn = self.cos[position : position + 1], self.sin[position : position + 1]
        return apply_rope(q, *turn), apply_rope(k, *turn), v

    def stored(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """The row's own token in the pool: (K, V) as [2, kv_heads, head_dim] and their scale words [2, kv_heads]."""
        position = int(self.position[row])
        page = int(self.page_table[self.slot[row], position // PAGE_TOKENS])
        s = self.shape
        blocks = self.pool.view(-1, self.layers, s.kv_heads, block_bytes(s.bits, s.head_dim))[page, self.layer]
        token = position % PAGE_TOKENS
        if s.bits == 16:
            both = torch.stack(unpack_bf16(blocks, s.head_dim))[:, :, token]
            return both, torch.zeros(0), torch.zeros(0)
        codes, words = unpack_int4(blocks, s.head_dim)
        scale_zero = torch.stack(words)[:, :, token].contiguous().view(torch.bfloat16).unflatten(-1, (-1, 2))
        return torch.stack(codes)[:, :, token], scale_zero[..., 0], scale_zero[..., 1]


def make_step(
    shape: Shape,
    contexts: list[int],
    rows_of: list[int] | None = None,
    *,
    seed: int = 0,
    layers: int = 3,
    layer: int = 1,
    pool: Tensor | None = None,
    pages: Tensor | None = None,
    key_size: float = 1.0,
    value_sizes: Tensor | None = None,
    device: str = "cuda",
    functions: Library | None = None,
) -> Step:
    """Requests of these contexts, their newest `rows_of` tokens (default one each) being this launch's rows.

    `pool` and `pages`: use this memory and these page ids instead of the fewest. `value_sizes` [64]: sizes of the
    values of tokens, repeated along the context. `functions`: by default those of `make cuda`.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    counts = rows_of or [1] * len(contexts)
    s, dim = shape, shape.head_dim
    pages_of = [-(-c // PAGE_TOKENS) for c in contexts]
    bytes_of_block = block_bytes(s.bits, dim)
    if pages is None:
        pages = torch.randperm(sum(pages_of) + 3, generator=generator, device=device)
    if pool is None:
        pool = torch.empty((sum(pages_of) + 3) * layers * s.kv_heads * bytes_of_block, dtype=torch.uint8, device=device)
        pool.fill_(255)
    blocks = pool.view(-1, layers, s.kv_heads, bytes_of_block)
    table = torch.full((len(contexts) + 1, max(pages_of)), 2**30, dtype=torch.int32, device=device)
    requests, slots, taken = [], [len(contexts) - i for i in range(len(contexts))], 0
    sizes = value_sizes.to(device) if value_sizes is not None else torch.ones(PAGE_TOKENS, device=device)
    for context, count, used, slot in zip(contexts, counts, pages_of, slots, strict=True):
        past = context - count
        k, v = torch.randn(2, past, s.kv_heads, dim, generator=generator, device=device)
        k = key_size * k + 0.5
        v *= sizes.repeat(-(-past // PAGE_TOKENS))[:past, None, None]
        k, v = EXACT.round16(k), EXACT.round16(v)
        ids = pages[taken : taken + used]
        taken += used
        table[slot, :used] = ids.int()
        if s.bits == 4:
            quantized = [quantize_heads(x, s.spec, s.signs.to(device)) for x in (k, v)]
            requests.append(Request(past, *quantized))
            codes = tuple(_paged(x.codes, used, 15) for x in quantized)
            words = tuple(
                _paged(torch.stack((x.scale, x.zero), -1).view(torch.int32).squeeze(-1), used, -1) for x in quantized
            )
            packed = pack_int4(codes, words, dim)  # type: ignore[arg-type]
        else:
            requests.append(Request(past, k.bfloat16(), v.bfloat16()))
            packed = pack_bf16(*(_paged(x.bfloat16(), used, torch.nan) for x in (k, v)))
        blocks[ids, layer] = packed.view(used, s.kv_heads, bytes_of_block)
    request_of_row = [i for i, count in enumerate(counts) for _ in range(count)]
    positions = [c - n + i for c, n in zip(contexts, counts, strict=True) for i in range(n)]
    max_context = max(contexts) + 7
    inverse = 10000.0 ** -(torch.arange(0, dim, 2, device=device) / dim)
    angles = torch.arange(max_context, device=device)[:, None] * inverse
    qkv = torch.randn(len(positions), s.channels, generator=generator, device=device)
    qkv[:, : s.heads * dim] *= 1.5
    norms = (1 + 0.3 * torch.randn(2, dim, generator=generator, device=device)).unbind() if s.norms else (None, None)
    return Step(
        *(shape, requests, request_of_row, layers, layer, max_context, pool, table),
        torch.tensor(positions, dtype=torch.int32, device=device),
        torch.tensor([slots[r] for r in request_of_row], dtype=torch.int32, device=device),
        *(qkv, angles.cos(), angles.sin(), *norms),
        functions or library(),
    )


def _paged(x: Tensor, pages: int, poison: float) -> Tensor:
    """[tokens, kv_heads, ...] to [pages · kv_heads, 64, ...], the missing tokens filled with `poison`."""
    full = torch.full((pages * PAGE_TOKENS, *x.shape[1:]), poison, dtype=x.dtype, device=x.device)
    full[: x.shape[0]] = x
    return full.unflatten(0, (pages, PAGE_TOKENS)).transpose(1, 2).flatten(0, 1).contiguous()


def _joined(old: QuantizedHeads, new: QuantizedHeads) -> QuantizedHeads:
    return QuantizedHeads(*(torch.cat(pair) for pair in zip(_parts(old), _parts(new), strict=True)))


def _parts(x: QuantizedHeads) -> tuple[Tensor, Tensor, Tensor]:
    return x.codes, x.scale, x.zero
