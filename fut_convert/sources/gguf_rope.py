"""RoPE scaling of a GGUF file, as a transformers `rope_scaling` section.

Llama 3 files do not name their scaling: they hold the factor by which each frequency is divided (`rope_freqs.weight`).
The parameters are recovered from those factors and accepted only if they give the same factors again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fut_convert.errors import CheckpointError, UnsupportedModelError
from fut_convert.sources.gguf_file import shortest_decimal

#: Parameters of every Llama 3 release, tried before solving for others.
_LLAMA3_USUAL = (1.0, 4.0, 8192)

#: Factors are stored as float32 and computed in float32.
_TOLERANCE = 1e-4

#: Keys that change YaRN's attention factor or ramp in llama.cpp in ways its versions disagree about -> neutral value.
_YARN_NEUTRAL = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}


def rope_scaling(
    metadata: Mapping[str, Any],
    architecture: str,
    theta: float,
    head_dim: int,
    factors: Sequence[float] | None,
    where: str,
) -> dict[str, Any] | None:
    """The `rope_scaling` section of the model, or None.

    Args:
        metadata: of the file; the keys under `{architecture}.rope.` are read.
        theta: RoPE base.
        factors: `rope_freqs.weight` [head_dim / 2], if the file has it.

    Raises:
        UnsupportedModelError: a scaling that has no exact counterpart.
        CheckpointError: a parameter is missing.
    """
    prefix = f"{architecture}.rope.scaling."
    kind = metadata.get(f"{prefix}type", "none")
    factor = metadata.get(f"{prefix}factor") or metadata.get(f"{architecture}.rope.scale_linear")
    if f"{prefix}type" not in metadata and factor not in (None, 0.0, 1.0):
        kind = "linear"
    if factors is not None and any(f != 1 for f in factors):
        if kind != "none":
            raise UnsupportedModelError(
                f"{where}: RoPE scaling {kind!r} together with rope_freqs.weight is not supported"
            )
        return llama3_scaling(factors, theta, head_dim, where)
    if kind == "none":
        return None
    if not factor:
        raise CheckpointError(f"{where}: {prefix}factor is missing, which RoPE scaling {kind!r} needs")
    if kind == "linear":
        return None if factor == 1.0 else {"rope_type": "linear", "factor": shortest_decimal(factor)}
    if kind != "yarn":
        raise UnsupportedModelError(f"{where}: RoPE scaling {kind!r} is not supported; supported are linear and yarn")
    for key, neutral in _YARN_NEUTRAL.items():
        value = metadata.get(prefix + key, neutral)
        if value != neutral:
            raise UnsupportedModelError(
                f"{where}: {prefix}{key} is {shortest_decimal(value)}, which has no exact counterpart; "
                "convert the original checkpoint"
            )
    section = {
        "rope_type": "yarn",
        "factor": shortest_decimal(factor),
        "original_max_position_embeddings": metadata.get(f"{prefix}original_context_length"),
        "beta_fast": metadata.get(f"{prefix}yarn_beta_fast"),
        "beta_slow": metadata.get(f"{prefix}yarn_beta_slow"),
    }
    return {key: value for key, value in section.items() if value is not None}


def llama3_factors(factor: float, low: float, high: float, original: float, theta: float, head_dim: int) -> list[float]:
    """What Llama 3's scaling divides each of the head_dim / 2 frequencies by (transformers' definition)."""
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def llama3_scaling(factors: Sequence[float], theta: float, head_dim: int, where: str) -> dict[str, Any]:
    """Parameters whose Llama 3 factors are these. `low_freq_factor` is set to 1: only ratios can be told.

    Raises:
        UnsupportedModelError: no parameters give these factors.
    """
    if len(factors) != head_dim // 2:
        raise CheckpointError(f"{where}: rope_freqs.weight has {len(factors)} values, expected {head_dim // 2}")
    factor = shortest_decimal(max(factors))
    for low, high, original in (_LLAMA3_USUAL, *_solve_llama3(factors, factor, theta, head_dim)):
        again = llama3_factors(factor, low, high, original, theta, head_dim)
        if all(abs(a - b) <= _TOLERANCE * b for a, b in zip(again, factors, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": int(original),
            }
    raise UnsupportedModelError(
        f"{where}: rope_freqs.weight (largest factor {factor}) is not a Llama 3 scaling; "
        "convert the original checkpoint"
    )


def _solve_llama3(
    factors: Sequence[float], factor: float, theta: float, head_dim: int
) -> list[tuple[float, float, float]]:
    """Fit the ramp between the two ends: its `smooth` is a straight line over 1 / wavelength."""
    points = []
    for pair, value in enumerate(factors):
        if factor > 1 and 1 + _TOLERANCE < value < factor * (1 - _TOLERANCE):
            smooth = (1 / value - 1 / factor) / (1 - 1 / factor)
            points.append((1 / (2 * math.pi * theta ** (2 * pair / head_dim)), smooth))
    if len(points) < 2:
        return []
    (x0, y0), (x1, y1) = points[0], points[-1]
    slope = (y1 - y0) / (x1 - x0)
    offset = slope * x0 - y0
    if slope <= 0 or offset <= 0:
        return []
    high = 1 + 1 / offset
    # Round parameters first: the fit recovers them from float32 values, a little off.
    candidates = (round(high * 4) / 4, high)
    return [(1.0, h, float(round(slope * (h - 1)))) for h in candidates if h > 1]
