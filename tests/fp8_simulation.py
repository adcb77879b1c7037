"""FP8 prefill, simulated from `docs/numerics.md` alone.

Nothing of the packages is used: weights come as a checkpoint's tensors, E4M3 rounding is arithmetic on exponents, RoPE
works on complex numbers, and attention builds the full score matrix of every head. Sums run in FP64: two
simulations that sum in FP32 in different orders drift apart at every rounding, and only the mean over many tokens
of what they predict agrees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """What the simulation needs of a model's config."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    eps: float


def e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 value, ties to even, saturating at 448: 3 mantissa bits, exponents from -6, subnormals below."""
    magnitude = x.abs()
    step = torch.ldexp(torch.ones_like(x), torch.frexp(magnitude).exponent.clamp(-5, 9) - 4)
    return torch.sign(x) * ((magnitude / step).round() * step).clamp_max(448.0)


def bf16(x: Tensor) -> Tensor:
    """Nearest BF16 value."""
    return x.to(torch.float32).to(torch.bfloat16).to(x.dtype)


#: Stacked projections of a layer, and the norm whose gain is folded into them.
PARTS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
    "o": (("self_attn.o_proj",), None),
    "gate_up": (("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
    "down": (("mlp.down_proj",), None),
}
Weights = dict[tuple[int, str], tuple[Tensor, Tensor]]


def quantize_weights(tensors: Mapping[str, Tensor], sizes: Sizes) -> Weights:
    """E4M3 values [out, in] and channel scales [out] of every projection."""
    weights: Weights = {}
    for i in range(sizes.layers):
        for module, (names, norm) in PARTS.items():
            w = torch.cat([tensors[f"model.layers.{i}.{n}.weight"].float() for n in names])
            if norm is not None:
                w = w * tensors[f"model.layers.{i}.{norm}.weight"].float()
            scale = (w.abs().amax(1) / 448).clamp_min(1e-30)
            weights[i, module] = e4m3(w / scale[:, None]), scale
    return weights


def simulate_prefill(
    tensors: Mapping[str, Tensor], weights: Weights, sizes: Sizes, scales: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits FP64 [tokens, vocab] and the absolute maxima [layers, 4] that the call saw.

    Args:
        tensors: the checkpoint, Hugging Face names; the head is tied where it is absent.
        weights: from `quantize_weights`.
        scales: activation scales of the call, FP32 [layers, 4]: qkv, o, gate_up, down.
        ids: int64 [tokens].
    """
    seen = torch.zeros(sizes.layers, 4)
    embed = tensors["model.embed_tokens.weight"].double()
    h = bf16(embed[ids])
    turns = torch.arange(len(ids))[:, None] * (1 / sizes.theta ** (torch.arange(0, sizes.head_dim, 2) / sizes.head_dim))
    rotation = torch.complex(turns.cos(), turns.sin()).to(torch.complex128)
    for i in range(sizes.layers):

        def product(site: int, x: Tensor, module: str, rho: Tensor | float, i: int = i) -> Tensor:
            codes, channel = weights[i, module]
            seen[i, site] = x.abs().max()
            s = scales[i, site]
            return (e4m3(x.float() * (1 / s)).double() @ codes.double().T) * (rho * s.double()) * channel.double()

        def factor(x: Tensor) -> Tensor:
            return 1 / torch.sqrt((x * x).mean(1, keepdim=True) + sizes.eps)

        qkv = product(0, h, "qkv", factor(h))
        q_rows, kv_rows = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        q = bf16(turn(qkv[:, :q_rows].view(len(ids), sizes.heads, -1), rotation))
        k = bf16(turn(qkv[:, q_rows : q_rows + kv_rows].view(len(ids), sizes.kv_heads, -1), rotation))
        v = bf16(qkv[:, q_rows + kv_rows :].view(len(ids), sizes.kv_heads, -1))
        heads = []
        for head in range(sizes.heads):
            group = head * sizes.kv_heads // sizes.heads
            scores = q[:, head] @ k[:, group].T / sizes.head_dim**0.5
            scores = scores + torch.full_like(scores, float("-inf")).triu(1)
            p = torch.exp(scores - scores.max(1, keepdim=True).values)
            heads.append((bf16(p) @ v[:, group]) / p.sum(1, keepdim=True))
        h = bf16(h + product(1, torch.cat(heads, 1), "o", 1.0))
        both = product(2, h, "gate_up", factor(h))
        gate, up = both.chunk(2, dim=1)
        h = bf16(h + product(3, gate / (1 + torch.exp(-gate)) * up, "down", 1.0))
    x = bf16(h / torch.sqrt((h * h).mean(1, keepdim=True) + sizes.eps) * tensors["model.norm.weight"].double())
    return x @ tensors.get("lm_head.weight", embed).double().T, seen


def turn(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate half-split pairs: x [tokens, heads, head_dim], rotation complex [tokens, head_dim / 2]."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * rotation[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)
