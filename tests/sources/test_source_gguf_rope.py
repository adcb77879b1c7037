"""RoPE scalings of GGUF files: Llama 3's recovered from its factors, the named ones, and those refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_models import Tensors, write_gguf
from hypothesis import given
from hypothesis import strategies as st

from fut_convert.errors import CheckpointError, ConvertError, UnsupportedModelError
from fut_convert.sources import open_source
from fut_convert.sources.gguf_rope import llama3_factors, llama3_scaling
from fut_runtime.artifact.spec import RopeSpec
from synthetic_checkpoint import CheckpointShape

SHAPE = CheckpointShape(layers=1)


def spec_with(tmp_path: Path, metadata: dict[str, Any], factors: list[float] | None = None) -> RopeSpec:
    def add(tensors: Tensors) -> None:
        if factors is not None:
            tensors["rope_freqs.weight"] = np.array(factors, dtype=np.float32)

    with open_source(str(write_gguf(tmp_path / "model.gguf", SHAPE, metadata=metadata, change=add))) as source:
        assert source.check() == []
        return source.spec.rope


@pytest.mark.parametrize(
    ("theta", "factor", "low", "high", "original"),
    [(5e5, 8.0, 1.0, 4.0, 8192), (5e5, 32.0, 1.0, 4.0, 8192), (5e5, 8.0, 1.0, 4.0, 64), (1e4, 4.0, 1.0, 8.0, 512)],
)
def test_llama3_scaling_is_recovered(
    tmp_path: Path, theta: float, factor: float, low: float, high: float, original: int
) -> None:
    factors = llama3_factors(factor, low, high, original, theta, 64)
    rope = spec_with(tmp_path, {"llama.rope.freq_base": theta}, factors)
    assert rope == RopeSpec(
        "llama3",
        theta,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )


def test_llama3_factors_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    utilities = pytest.importorskip("transformers.modeling_rope_utils")
    section = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, rope_theta=5e5, rope_scaling=section
    )
    scaled, _ = utilities.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 5e5 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    ours = llama3_factors(8.0, 1.0, 4.0, 64, 5e5, 64)
    assert torch.allclose(plain / scaled.double(), torch.tensor(ours, dtype=torch.float64), rtol=1e-5)


@given(st.floats(2, 64), st.floats(2, 16), st.integers(64, 16384), st.sampled_from([1e4, 1e5, 5e5, 1e6]))
def test_recovered_scaling_has_the_same_factors(factor: float, high: float, original: int, theta: float) -> None:
    factors = [float(np.float32(f)) for f in llama3_factors(factor, 1.0, high, original, theta, 128)]
    if sum(1 < f < max(factors) for f in factors) < 2:
        return  # the ramp meets too few frequencies to be told
    found = llama3_scaling(factors, theta, 128, "x")
    again = llama3_factors(
        found["factor"], found["low_freq_factor"], found["high_freq_factor"],
        found["original_max_position_embeddings"], theta, 128,
    )  # fmt: skip
    assert np.allclose(again, factors, rtol=1e-4)


def test_factors_of_one_are_no_scaling(tmp_path: Path) -> None:
    assert spec_with(tmp_path, {}, [1.0] * 32) == RopeSpec()


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, RopeSpec()),
        ({"llama.rope.freq_base": 1e6}, RopeSpec(theta=1e6)),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, RopeSpec()),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5},
            RopeSpec("linear", factor=2.5),
        ),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}, RopeSpec()),
        ({"llama.rope.scale_linear": 2.0}, RopeSpec("linear", factor=2.0)),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 512,
                "llama.rope.scaling.attn_factor": 1.0,
            },
            RopeSpec("yarn", factor=4.0, original_max_position_embeddings=512),
        ),
    ],
)
def test_named_scalings(tmp_path: Path, metadata: dict[str, Any], expected: RopeSpec) -> None:
    assert spec_with(tmp_path, metadata) == expected


@pytest.mark.parametrize(
    ("metadata", "factors", "error", "reason"),
    [
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, None, ConvertError, "longrope"),
        ({"llama.rope.scaling.type": "linear"}, None, CheckpointError, "factor is missing"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.attn_factor": 0.7,
            },
            None,
            UnsupportedModelError,
            "attn_factor is 0.7",
        ),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            [8.0] * 32,
            UnsupportedModelError,
            "together with rope_freqs.weight",
        ),
        ({}, [1.0 + i for i in range(32)], UnsupportedModelError, "not a Llama 3 scaling"),
        ({}, [2.0] * 16, CheckpointError, "16 values, expected 32"),
    ],
)
def test_scaling_without_counterpart_is_refused(
    tmp_path: Path, metadata: dict[str, Any], factors: list[float] | None, error: type[ConvertError], reason: str
) -> None:
    with pytest.raises(error) as caught:
        spec_with(tmp_path, metadata, factors)
    assert reason in str(caught.value)
