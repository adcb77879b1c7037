"""The angles of rotary position embedding, with the scalings of transformers' `modeling_rope_utils`.

RoFormer (Su et al. 2021); linear (Chen et al. 2023), dynamic NTK, YaRN (Peng et al. 2023), and Llama 3.1's scaling.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fut_runtime.artifact.spec import ModelSpec, RopeSpec
from fut_runtime.errors import UnsupportedError


def inverse_frequencies(model: ModelSpec, planned_tokens: int | None = None) -> tuple[Tensor, float]:
    """Inverse frequencies, FP32 [head_dim / 2], and the factor on cosines and sines (1 except with YaRN).

    `planned_tokens`: longest context the caller will use. Dynamic scaling fixes its base there, because a base that
    grew with the context would make keys already in the cache stale.
    """
    rope, dim = model.rope, model.head_dim
    if rope.type == "dynamic":
        return _powers(_dynamic_base(model, planned_tokens), dim), 1.0
    plain = _powers(rope.theta, dim)
    if rope.type == "default":
        return plain, 1.0
    if rope.type == "linear":
        return plain / _required(rope, "factor"), 1.0
    if rope.type == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.type == "yarn":
        return _yarn(model, plain)
    raise UnsupportedError(f"RoPE type {rope.type!r} is not supported")


def rope_tables(model: ModelSpec, positions: Tensor, planned_tokens: int | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines, FP32 [tokens, head_dim / 2] each, for int64 positions [tokens], on their device."""
    inverse, factor = inverse_frequencies(model, planned_tokens)
    angles = positions.to(torch.float32)[:, None] * inverse.to(positions.device)[None, :]
    return angles.cos() * factor, angles.sin() * factor


def _powers(base: float, dim: int) -> Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _required(rope: RopeSpec, name: str) -> float:
    value = getattr(rope, name)
    if value is None:
        raise UnsupportedError(f"RoPE type {rope.type!r} needs {name!r}, which the checkpoint's config leaves out")
    return float(value)


def _dynamic_base(model: ModelSpec, planned_tokens: int | None) -> float:
    rope, dim = model.rope, model.head_dim
    limit = model.max_position_embeddings
    tokens = max(planned_tokens or limit, limit)
    factor = _required(rope, "factor")
    return float(rope.theta * ((factor * tokens / limit) - (factor - 1)) ** (dim / (dim - 2)))


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    factor = _required(rope, "factor")
    low, high = _required(rope, "low_freq_factor"), _required(rope, "high_freq_factor")
    original = _required(rope, "original_max_position_embeddings")
    wavelength = 2 * math.pi / plain
    blend = (original / wavelength - low) / (high - low)
    smooth = (1 - blend) * plain / factor + blend * plain
    scaled = torch.where(wavelength > original / low, plain / factor, smooth)
    return torch.where(wavelength < original / high, plain, scaled)


def _yarn(model: ModelSpec, plain: Tensor) -> tuple[Tensor, float]:
    rope, dim = model.rope, model.head_dim
    original = rope.original_max_position_embeddings or model.max_position_embeddings
    factor = rope.factor if rope.factor is not None else model.max_position_embeddings / original

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction(rope.beta_fast or 32.0), correction(rope.beta_slow or 1.0)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    inverse = plain / factor * ramp + plain * (1 - ramp)

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.attention_factor is not None:
        return inverse, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return inverse, magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return inverse, magnitude(1.0)
