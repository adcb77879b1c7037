"""Decode attention over the INT4 cache: ours, the floor of its bytes, and PyTorch's attention over a BF16 cache.

    python benchmarks/attention_decode.py [--heads 32 --kv-heads 8 --head-dim 128 --bits 4] [--output FILE.jsonl]

Every launch reads another layer's cache, more layers than the L2 holds, so that no cache is warm. A CUDA graph of one
launch a layer is replayed; times are the median over replays, divided by the launches. The read bandwidth behind the
floor is the best of a reduction and a copy in the same run.
"""

from __future__ import annotations

import argparse
import json

import torch

from fut_runtime.bench.machine import source_commit
from fut_runtime.bench.timing import replay_us
from fut_runtime.cuda.library import library
from fut_runtime.cuda.structs import AttentionShape, KVCache, Rows

PAGE_TOKENS = 64
#: Several times the L2 of an H200.
COLD_BYTES = 300e6
CASES = [(b, c) for c in (1024, 4096, 32768) for b in (1, 8, 32)] + [(1, 131072)]


def read_bandwidth() -> float:
    """Bytes a second of the faster of a reduction and a copy over 4 GB."""
    x = torch.randint(0, 100, (2**30,), dtype=torch.int32, device="cuda")
    y = torch.empty_like(x)
    size = x.numel() * 4
    reduce_us = replay_us(lambda: [x.amax() for _ in range(3)], repeats=7) / 3
    copy_us = replay_us(lambda: [y.copy_(x) for _ in range(3)], repeats=7) / 3
    return max(size / reduce_us, 2 * size / copy_us) * 1e6


def ours_us(batch: int, context: int, heads: int, kv_heads: int, dim: int, bits: int) -> tuple[float, int]:
    """Time of a launch of `fut_attention`, and the bytes of cache that it reads."""
    functions = library()
    pages_each = -(-context // PAGE_TOKENS)
    pages = batch * pages_each
    block = PAGE_TOKENS * (dim + 8) if bits == 4 else PAGE_TOKENS * dim * 4
    read = pages * kv_heads * block
    layers = max(2, min(256, int(COLD_BYTES / read) + 1))
    if bits == 4:
        pool = torch.randint(0, 256, (pages * layers * kv_heads, block), dtype=torch.uint8, device="cuda")
        scales = torch.empty(pages * layers * kv_heads, 2 * PAGE_TOKENS, 2, dtype=torch.bfloat16, device="cuda")
        scales[..., 0].uniform_(0.1, 0.2)
        scales[..., 1].uniform_(-1.5, -0.75)
        pool[:, PAGE_TOKENS * dim :] = scales.view(torch.uint8).flatten(1)
    else:
        pool = torch.randn(pages * layers * kv_heads, block // 2, dtype=torch.bfloat16, device="cuda")
    table = torch.randperm(pages, device="cuda").int().view(batch, pages_each)
    position = torch.full((batch,), context - 1, dtype=torch.int32, device="cuda")
    slot = torch.arange(batch, dtype=torch.int32, device="cuda")
    angles = torch.rand(context, dim // 2, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    qkv = torch.randn(batch, (heads + 2 * kv_heads) * dim, device="cuda")
    out = torch.empty(batch, heads * dim, dtype=torch.bfloat16, device="cuda")
    shape = AttentionShape(heads, kv_heads, dim, context, 1e-5, cos.data_ptr(), sin.data_ptr())
    cache = KVCache(pool.data_ptr(), pages, layers, kv_heads, dim, bits, 1, 1)
    rows = Rows(None, position.data_ptr(), slot.data_ptr(), table.data_ptr(), pages_each, batch)
    workspace = torch.zeros(functions.fut_attention_workspace_bytes(shape, batch), dtype=torch.uint8, device="cuda")

    def launch_all() -> None:
        for layer in range(layers):
            functions.call(
                "fut_attention",
                *(shape, cache, layer, rows, 0, qkv.data_ptr(), None, None, out.data_ptr()),
                *(workspace.data_ptr(), workspace.numel(), torch.cuda.current_stream().cuda_stream),
            )

    return replay_us(launch_all, repeats=7) / layers, read


def pytorch_us(batch: int, context: int, heads: int, kv_heads: int, dim: int) -> float | None:
    """Time of scaled_dot_product_attention over contiguous BF16 K and V, or None where they do not fit."""
    size = 2 * batch * kv_heads * context * dim * 2
    layers = max(2, min(64, int(COLD_BYTES / size) + 1))
    if layers * size > 60e9:
        return None
    kv = torch.randn(layers, 2, batch, kv_heads, context, dim, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(batch, heads, 1, dim, dtype=torch.bfloat16, device="cuda")

    def launch_all() -> None:
        for k, v in kv:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return replay_us(launch_all, repeats=7) / layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--bits", type=int, default=4, choices=(4, 16))
    parser.add_argument("--no-peers", action="store_true", help="leave PyTorch out")
    parser.add_argument("--output", help="append JSON lines to this file")
    options = parser.parse_args()
    shape = options.heads, options.kv_heads, options.head_dim
    bandwidth = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}, {bandwidth / 1e12:.2f} TB/s, heads {shape}, {options.bits}-bit cache")
    print("batch context |    ours us  floor us  fraction | PyTorch us  ratio")
    for batch, context in CASES:
        torch.cuda.empty_cache()
        time_us, read = ours_us(batch, context, *shape, options.bits)
        floor_us = read / bandwidth * 1e6
        torch.cuda.empty_cache()
        peer_us = None if options.no_peers else pytorch_us(batch, context, *shape)
        line = {
            "benchmark": "attention_decode",
            "commit": source_commit() or "unknown",
            "device": torch.cuda.get_device_name(),
            "heads": shape,
            "bits": options.bits,
            "batch": batch,
            "context": context,
            "ours_us": round(time_us, 2),
            "floor_us": round(floor_us, 2),
            "read_tb_s": round(bandwidth / 1e12, 3),
            "sdpa_bf16_us": peer_us and round(peer_us, 2),
        }
        peer = f"{peer_us:10.1f} {peer_us / time_us:6.2f}" if peer_us else ""
        print(
            f"{batch:5d} {context:7d} | {time_us:10.2f} {floor_us:9.2f} {floor_us / time_us:9.2f} | {peer}", flush=True
        )
        if options.output:
            with open(options.output, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
