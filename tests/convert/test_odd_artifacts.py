"""Seventeen odd checkpoints, converted: they compute what transformers computes, and generate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fut_convert import convert
from fut_runtime import Engine, SamplingParams
from fut_runtime.artifact.reader import Artifact
from fut_runtime.reference import backend as reference
from odd_checkpoints import ODD_CHECKPOINTS, odd_input_ids, reference_logits

Make = Callable[..., Path]
#: Calibration changes neither shapes nor the function: two checkpoints show that it works on odd ones too.
CALIBRATED = ("qwen3_qk_norm", "head_dim_80")
PREFILLED = 64


@pytest.fixture(scope="module", params=ODD_CHECKPOINTS)
def converted(
    request: pytest.FixtureRequest, odd_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Artifact]:
    """An odd checkpoint, and the artifact with its weights in every format."""
    checkpoint = odd_checkpoint(request.param)
    overrides = {
        "weights": ["e4m3", "int4", "bf16"],
        "calibration.enabled": request.param in CALIBRATED,
        "calibration.windows": 2,
        "calibration.window_tokens": 64,
        "calibration.allow_few_tokens": True,
        "int4.scale_method": "weighted_search" if request.param in CALIBRATED else "absmax_7.5",
    }
    result = convert(str(checkpoint), tmp_path_factory.mktemp("odd") / "out", overrides=overrides)
    return checkpoint, Artifact.open(result.path, verify=True)


def test_logits_in_bf16_equal_transformers(converted: tuple[Path, Artifact]) -> None:
    pytest.importorskip("transformers", reason="transformers gives the reference logits")
    checkpoint, artifact = converted
    backend = reference.load(artifact, decode_mode="bf16", prefill_mode="bf16", kv_cache="bf16", compute="fp32")
    ids = odd_input_ids()
    request = backend.open_request(ids.numel())
    rows = [backend.prefill([(request, ids[0, :PREFILLED].tolist())])]
    rows += [backend.decode([(request, token)]) for token in ids[0, PREFILLED:].tolist()]
    expected = reference_logits(checkpoint, ids)[0, PREFILLED - 1 :]
    assert (torch.cat(rows) - expected).abs().max() < 1e-3


def test_greedy_generation_is_the_same_alone_and_beside_longer_prompts(converted: tuple[Path, Artifact]) -> None:
    _, artifact = converted
    ids = odd_input_ids()[0].tolist()
    prompts = [ids[:5], ids[5:60], "A text of some words.", ids[:90]]
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    with Engine(artifact.path, backend="reference", device="cpu", prefill_chunk=32) as engine:
        together = engine.generate(prompts, params)  # type: ignore[arg-type]
        for prompt, completion in zip(prompts, together, strict=True):
            assert len(completion.token_ids) == 5
            assert engine.generate([prompt], params)[0].token_ids == completion.token_ids  # type: ignore[list-item]
