"""The engine's backend over real artifacts: teacher forcing against steps, and what it reports of its activations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fut_convert import convert
from fut_runtime.artifact.reader import Artifact
from fut_runtime.reference import backend as reference
from synthetic_checkpoint import CheckpointShape, write_checkpoint

TOKENS = 48


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A small artifact in every format."""
    path = tmp_path_factory.mktemp("reference")
    checkpoint = write_checkpoint(path / "model", CheckpointShape(heads=4, kv_heads=2))
    options = {"weights": ["e4m3", "int4", "bf16"], "calibration.enabled": False}
    return Artifact.open(convert(str(checkpoint), path / "artifact", overrides=options).path)


def decoded(artifact: Artifact, mode: str, compute: str, ids: Tensor, *, steps: bool) -> Tensor:
    """Log-probabilities [tokens, vocab] of every position, decoded one token a call or all at once."""
    model = reference.load(artifact, decode_mode=mode, prefill_mode="decode", compute=compute).model
    cache = model.new_cache(len(ids))
    parts = ids.split(1) if steps else [ids]
    with torch.inference_mode():
        hidden = torch.cat([model.forward(cache, part, "decode") for part in parts])
        return model.logits(hidden).float().log_softmax(-1)


@pytest.mark.parametrize("mode", ["int4", "fp8", "bf16"])
def test_teacher_forcing_equals_steps_in_every_mode(artifact: Artifact, mode: str) -> None:
    ids = torch.randint(384, (TOKENS,), generator=torch.Generator().manual_seed(7))
    together, stepwise = (decoded(artifact, mode, "fp32", ids, steps=s) for s in (False, True))
    torch.testing.assert_close(together, stepwise, rtol=0, atol=1e-3)


@pytest.mark.parametrize("mode", ["int4", "fp8", "bf16"])
def test_teacher_forcing_scores_like_steps_with_every_rounding(artifact: Artifact, mode: str) -> None:
    """Sums in another order move a few BF16 roundings; what they do to the likelihoods has no direction."""
    differences = []
    for seed in range(6):
        ids = torch.randint(384, (TOKENS,), generator=torch.Generator().manual_seed(seed))
        together, stepwise = (decoded(artifact, mode, "exact", ids, steps=s) for s in (False, True))
        differences.append((together - stepwise)[:-1].gather(1, ids[1:, None]).mean())
    differences = torch.stack(differences)
    assert differences.mean().abs() <= 3 * differences.std() / len(differences) ** 0.5 + 1e-4
    assert differences.abs().max() < 0.02


@pytest.mark.parametrize("scale_mode", ["request", "delayed"])
def test_the_report_shows_the_scales_that_a_prompt_led_to(artifact: Artifact, scale_mode: str) -> None:
    backend = reference.load(artifact, scale_mode=scale_mode)
    before = backend.activation_report()
    assert before["scale"] == before["initial_scale"]
    request = backend.open_request(TOKENS)
    backend.prefill([(request, list(range(TOKENS)))])
    backend.close_request(request)
    after = backend.activation_report()
    assert after["scale"] != after["initial_scale"]
    assert after["elements"] != before["elements"]


def test_frozen_scales_are_reported_as_they_are(artifact: Artifact) -> None:
    backend = reference.load(artifact, scale_mode="frozen")
    backend.prefill([(backend.open_request(TOKENS), list(range(TOKENS)))])
    report = backend.activation_report()
    assert report["scale"] == report["initial_scale"]
