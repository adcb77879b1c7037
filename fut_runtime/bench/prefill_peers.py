"""A decoder layer for prompts as a user of stock PyTorch would compile it: in FP8 with fixed scales, and in BF16."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fut_runtime.artifact.spec import MODULES, ModelSpec
from fut_runtime.cuda.gemm import E4M3

#: Name in the lines → whether products are E4M3.
PEERS: dict[str, bool] = {"torch_fp8": True, "torch_bf16": False}
_ACTIVATION_SCALE = 0.02
_WEIGHT_SCALE = 1e-4
_E4M3_MAX = 448.0
#: Distinct layers that fill the L2 several times.
_LEAST_BYTES = 256 << 20

Linear = Callable[[Tensor], Tensor]


def peer_layers(
    model: ModelSpec, name: str, batch: int, tokens: int, device: torch.device
) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of some compiled layers over [batch, tokens, hidden], and how many layers it runs.

    Compiling takes tens of seconds.
    """
    eight_bit = PEERS[name]
    layer_bytes = sum(math.prod(model.module_shape(m)) for m in MODULES) * (1 if eight_bit else 2)
    count = max(1, math.ceil(_LEAST_BYTES / layer_bytes))
    torch._dynamo.reset()
    with torch.no_grad():
        weights = [{m: _linear(*model.module_shape(m), eight_bit, device) for m in MODULES} for _ in range(count)]
        h = torch.randn(batch, tokens, model.hidden_size, device=device, dtype=torch.bfloat16)
        layer = torch.compile(_layer(model, batch, tokens, device), dynamic=False)

        def run() -> Tensor:
            x = h
            for linear in weights:
                x = layer(x, linear)
            return x

        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    return graph, count


def _linear(rows: int, columns: int, eight_bit: bool, device: torch.device) -> Linear:
    matrix = torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * columns**-0.5
    if not eight_bit:
        return lambda x: F.linear(x, matrix)
    scale = torch.tensor(_ACTIVATION_SCALE, device=device)
    weight_scale = torch.tensor(_WEIGHT_SCALE, device=device)
    stored = (matrix.float() / weight_scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(E4M3)

    def multiply(x: Tensor) -> Tensor:
        rows_of = x.flatten(0, -2)
        small = (rows_of.float() / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(E4M3)
        product = torch._scaled_mm(
            small, stored.t(), scale, weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        unflattened: Tensor = product.unflatten(0, x.shape[:-1])
        return unflattened

    return multiply


def _layer(
    model: ModelSpec, batch: int, tokens: int, device: torch.device
) -> Callable[[Tensor, dict[str, Linear]], Tensor]:
    heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
    gain = torch.ones(model.hidden_size, device=device, dtype=torch.bfloat16)
    angles = 6.28 * torch.rand(tokens, dim // 2, device=device)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    keys, values = torch.zeros(2, batch, kv_heads, tokens, dim, device=device, dtype=torch.bfloat16).unbind(0)

    def norm(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + model.rms_norm_eps)).bfloat16() * gain

    def split(x: Tensor, count: int) -> Tensor:
        return x.view(batch, tokens, count, dim).transpose(1, 2)

    def turn(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def layer(h: Tensor, linear: dict[str, Linear]) -> Tensor:
        q, k, v = linear["qkv"](norm(h)).split((model.q_size, model.kv_size, model.kv_size), -1)
        k, v = turn(split(k, kv_heads)), split(v, kv_heads)
        keys.copy_(k)
        values.copy_(v)
        attended = F.scaled_dot_product_attention(turn(split(q, heads)), k, v, is_causal=True, enable_gqa=True)
        h = h + linear["o"](attended.transpose(1, 2).reshape(batch, tokens, model.q_size))
        gate, up = linear["gate_up"](norm(h)).chunk(2, -1)
        return h + linear["down"](F.silu(gate) * up)

    return layer
