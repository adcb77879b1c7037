"""What users of other tools have lost days to, as far as no other file of tests has it as its subject."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fut_convert import convert
from fut_convert.sources.base import Source
from fut_runtime.artifact.reader import Artifact
from fut_runtime.reference import backend as reference
from interrupted import RECIPES, SHORT
from odd_checkpoints import reference_logits

Make = Callable[..., Path]


def test_a_residual_stream_beyond_float16(tiny_checkpoint: Make, tmp_path: Path) -> None:
    """The checkpoint's type is that of its weights: what is computed with them may be larger than it allows."""
    pytest.importorskip("transformers")
    checkpoint = tiny_checkpoint(layers=3, dtype=torch.float16)
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.down_proj.weight"] *= 30_000
    save_file(tensors, path)
    overrides = {**SHORT, "weights": ["e4m3", "int4", "bf16"], "int4.scale_method": "absmax_7"}
    artifact = Artifact.open(convert(str(checkpoint), tmp_path / "out", overrides=overrides, report=False).path)
    seen = [artifact.tensor(f"layers.{layer}.activation_scale")[0].item() * 448 for layer in range(3)]
    assert seen[0] < 100 and min(seen[1:]) > 1.5 * torch.finfo(torch.float16).max
    tokens = [5, 60, 300, 7, 9, 11]
    backend = reference.load(artifact, prefill_mode="bf16", decode_mode="bf16", kv_cache="bf16")
    found = backend.prefill([(backend.open_request(len(tokens)), tokens)])[0]
    expected = reference_logits(checkpoint, torch.tensor([tokens]))[0, -1]
    assert bool(found.isfinite().all()) and (found - expected).norm() < 0.02 * expected.norm()


def test_a_vocabulary_of_128k_goes_through_memory_in_tiles(
    tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, hidden = 128_256, 128
    checkpoint = tiny_checkpoint(layers=1)
    tensors = load_file(checkpoint / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name].repeat(vocab // len(tensors[name]), 1)
    save_file(tensors, checkpoint / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"vocab_size": vocab}))
    read: dict[str, list[int]] = {}
    original = Source.load_rows

    def watched(self: Source, name: str, start: int, stop: int) -> torch.Tensor:
        read.setdefault(name, []).append(stop - start)
        return original(self, name, start, stop)

    monkeypatch.setattr(Source, "load_rows", watched)
    recipe = {**RECIPES["uncalibrated"], "head": "e4m3", "max_shard_gb": 0.01}
    artifact = Artifact.open(convert(str(checkpoint), tmp_path / "out", overrides=recipe, report=False).path)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert sum(read[name]) == vocab and max(read[name]) <= vocab // 8
    assert artifact.tensor("embed").shape == artifact.dequantized("head", "e4m3").shape == (vocab, hidden)


@pytest.mark.parametrize(
    "contents",
    [
        {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 0]},
        {"num_beams": 1, "early_stopping": True, "max_length": 20, "max_new_tokens": 4096, "transformers_version": "x"},
    ],
)
def test_a_generation_config_that_contradicts_itself_is_kept_as_it_is(
    contents: dict[str, Any], tiny_checkpoint: Make, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(layers=1)
    text = json.dumps(contents, indent=7) + "\r\n"
    (checkpoint / "generation_config.json").write_text(text, newline="")
    out = convert(str(checkpoint), tmp_path / "out", overrides=RECIPES["uncalibrated"], report=False).path
    assert (out / "generation_config.json").read_bytes() == text.encode()
    assert Artifact.open(out).manifest.model.eos_token_ids == tuple(contents.get("eos_token_id", [2]))
