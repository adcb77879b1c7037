"""What stock PyTorch reaches for the same layers on the same card: a compiled BF16 block, and one with its INT4 kernel.

A block is a decoder layer as a user would write it for `torch.compile`: norm, qkv, RoPE, cache write, attention over a
BF16 cache, o, norm, gate and up, SwiGLU, down. The INT4 block runs `_weight_int4pack_mm`, PyTorch's own kernel for
groups of 128.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fut_runtime.artifact.spec import MODULES, ModelSpec
from fut_runtime.bench.timing import interval_ms

#: Name in the lines → weights of the block.
PEERS: dict[str, str] = {"torch_bf16": "bf16", "torch_int4": "int4"}
_GROUP = 128
_INNER_K_TILES = 8
#: Layers are distinct and as many as fill the L2 several times, so that weights come from memory.
_LEAST_BYTES = 512 << 20

Linear = Callable[[Tensor], Tensor]


def peer_layer_us(
    model: ModelSpec, weights: str, cases: Sequence[tuple[int, int]], device: torch.device
) -> dict[tuple[int, int], float]:
    """Microseconds a layer of one peer for each (batch, context); compiling takes tens of seconds for each.

    Args:
        weights: `bf16` or `int4`.
    """
    bytes_a_layer = sum(math.prod(model.module_shape(m)) for m in MODULES) * (2 if weights == "bf16" else 0.53)
    layers = max(2, math.ceil(_LEAST_BYTES / bytes_a_layer))
    with torch.no_grad():
        blocks = [
            {module: _linear(*model.module_shape(module), weights, device) for module in MODULES} for _ in range(layers)
        ]
        times = {}
        for batch, context in cases:
            torch._dynamo.reset()
            times[batch, context] = _time(model, blocks, batch, context, device) / layers * 1e3
            torch.cuda.empty_cache()
    return times


def _linear(rows: int, columns: int, weights: str, device: torch.device) -> Linear:
    if weights == "bf16":
        matrix = torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * columns**-0.5
        return lambda x: F.linear(x, matrix)
    codes = torch.randint(0, 256, (rows, columns // 2), device=device, dtype=torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, _INNER_K_TILES)
    scales = torch.rand(columns // _GROUP, rows, 2, device=device, dtype=torch.bfloat16) * (0.2 * columns**-0.5)
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, _GROUP, scales)


def _time(
    model: ModelSpec, blocks: Sequence[dict[str, Linear]], batch: int, context: int, device: torch.device
) -> float:
    """Milliseconds of one replay of all blocks."""
    heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
    gain = torch.ones(model.hidden_size, device=device, dtype=torch.bfloat16)
    angles = torch.rand(1, 1, 1, dim // 2, device=device)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    position = torch.tensor([context - 1], device=device)
    caches = [
        torch.randn(2, batch, kv_heads, context, dim, device=device, dtype=torch.bfloat16).unbind(0) for _ in blocks
    ]

    def norm(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + model.rms_norm_eps)).bfloat16() * gain

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def step(h: Tensor) -> Tensor:
        for linear, (keys, values) in zip(blocks, caches, strict=True):
            q, k, v = linear["qkv"](norm(h)).split((model.q_size, model.kv_size, model.kv_size), -1)
            keys.index_copy_(2, position, rotate(k.view(batch, kv_heads, 1, dim)))
            values.index_copy_(2, position, v.view(batch, kv_heads, 1, dim))
            query = rotate(q.view(batch, heads, 1, dim))
            o = F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
            h = h + linear["o"](o.view(batch, model.q_size))
            gate, up = linear["gate_up"](norm(h)).chunk(2, -1)
            h = h + linear["down"](F.silu(gate) * up)
        return h

    compiled = torch.compile(step, dynamic=False)
    h = torch.randn(batch, model.hidden_size, device=device, dtype=torch.bfloat16)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            compiled(h)
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compiled(h)
    return interval_ms(graph.replay, repeats=30, warm_up=5)
