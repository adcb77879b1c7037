"""The decode cache's copy of a history: byte for byte what attention of decoding would have appended."""

from __future__ import annotations

import ctypes

import torch

from attention_setup import Shape, Step, make_step
from fut_runtime.cuda.library import Library
from fut_runtime.cuda.structs import PAGE_TOKENS, CacheCopyCall, KVCache, PageSpan
from kv_blocks import block_bytes

#: A whole page and one that begins another; pieces of pages, before, between and behind tokens that are there already.
CASES = {"whole": ([129], [64]), "pieces": ([100, 10, 70, 65], [40, 3, 11, 2])}


def check_copy(shape: Shape, case: str, functions: Library, device: str) -> None:
    contexts, counts = CASES[case]
    step = make_step(shape, contexts, counts, device=device, functions=functions)
    before = step.pool.clone()
    step.run(chunked=True)
    appended = step.pool.clone()
    assert not torch.equal(appended, before)
    step.pool.copy_(before)
    copy(step)
    assert torch.equal(step.pool, appended)


def copy(step: Step) -> None:
    """Put the rows' K and V into a history whose pages lie otherwise than the cache's, and copy them from there."""
    s, device = step.shape, step.device
    table = torch.full((step.page_table.shape[0], 5), -1, dtype=torch.int32, device=device)
    pages = iter(range(50, 0, -1))
    for slot in step.slot.unique().tolist():
        table[slot, :3] = torch.tensor([next(pages) for _ in range(3)], dtype=torch.int32, device=device)
    history = torch.full((2, 51, s.kv_heads, PAGE_TOKENS, s.head_dim), torch.nan, dtype=torch.bfloat16, device=device)
    touched: dict[tuple[int, int], list[int]] = {}
    for row, (position, slot) in enumerate(zip(step.position.tolist(), step.slot.tolist(), strict=True)):
        _, k, v = step.heads_of(row)
        page, token = divmod(position, PAGE_TOKENS)
        history[0, table[slot, page], :, token] = k[0].bfloat16()
        history[1, table[slot, page], :, token] = v[0].bfloat16()
        touched.setdefault((slot, page), []).append(token)
    spans = torch.tensor(
        [(slot, page, tokens[0], len(tokens)) for (slot, page), tokens in touched.items()], device=device
    ).int()
    assert ctypes.sizeof(PageSpan) == spans.element_size() * spans.shape[1]
    pool_pages = step.pool.numel() // (step.layers * s.kv_heads * block_bytes(s.bits, s.head_dim))
    cache = KVCache(
        step.pool.data_ptr(), pool_pages, step.layers, s.kv_heads, s.head_dim, s.bits, s.rotation, s.zero_point
    )
    call = CacheCopyCall(
        cache=cache,
        k=history[0].data_ptr(),
        v=history[1].data_ptr(),
        history_table=table.data_ptr(),
        cache_table=step.page_table.data_ptr(),
        spans=spans.data_ptr(),
        history_width=table.shape[1],
        cache_width=step.page_table.shape[1],
        count=len(touched),
        layer=step.layer,
    )
    stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else None
    step.functions.call("fut_cache_copy", ctypes.byref(call), stream)
    if device.type == "cuda":
        torch.cuda.synchronize()
