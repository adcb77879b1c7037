"""Export: the checkpoint holds what the artifact computes with, and transformers loads it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from fut_runtime.artifact.export import export_checkpoint, unfold_gain
from fut_runtime.artifact.export_config import config_of
from fut_runtime.artifact.manifest import Manifest
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.spec import ModelSpec, RopeSpec
from fut_runtime.errors import ArtifactError, UnsupportedError
from tiny_artifact import MODEL, make_manifest, random_tensors, write_artifact

QWEN2 = replace(MODEL, architecture="Qwen2ForCausalLM", qkv_bias=True)
QWEN3 = replace(MODEL, architecture="Qwen3ForCausalLM", qk_norm=True, tie_word_embeddings=False)


def load(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, each from the file that the index names."""
    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {}
    for name, file in weight_map.items():
        with safe_open(directory / file, "pt") as shard:
            tensors[name] = shard.get_tensor(name)
    return tensors


def artifact_of(directory: Path, manifest: Manifest, **changed: Tensor) -> Artifact:
    tensors = {**random_tensors(manifest), **{k.replace("__", "."): v for k, v in changed.items()}}
    return Artifact.open(write_artifact(directory, manifest, tensors=tensors))


@pytest.mark.parametrize("weight_format", ["int4", "e4m3", "bf16"])
@pytest.mark.parametrize("gain", ["folded", "runtime"])
def test_matrices_times_gains_are_those_of_the_artifact(tmp_path: Path, weight_format: str, gain: str) -> None:
    manifest = make_manifest(formats=("int4", "e4m3", "bf16"), gain=gain)
    artifact = artifact_of(tmp_path / "a", manifest)
    export_checkpoint(artifact, tmp_path / "e", weight_format=weight_format, dtype="f32")
    tensors = load(tmp_path / "e")
    layer = "model.layers.1"
    for module, norm, parts in (
        ("qkv", "input_layernorm", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        ("gate_up", "post_attention_layernorm", ["mlp.gate_proj", "mlp.up_proj"]),
        ("o", None, ["self_attn.o_proj"]),
        ("down", None, ["mlp.down_proj"]),
    ):
        stacked = torch.cat([tensors[f"{layer}.{part}.weight"] for part in parts])
        if norm is not None and gain == "folded":
            stacked = stacked * tensors[f"{layer}.{norm}.weight"]
        expected = artifact.dequantized(f"layers.1.{module}", weight_format)
        torch.testing.assert_close(stacked, expected, rtol=1e-6, atol=0)
    assert torch.equal(tensors["model.embed_tokens.weight"], artifact.tensor("embed").float())
    assert torch.equal(tensors["model.norm.weight"], artifact.tensor("final_norm"))
    assert "lm_head.weight" not in tensors


def test_zero_gains_give_zero_columns_and_are_reported(tmp_path: Path) -> None:
    manifest = make_manifest()
    gain = random_tensors(manifest)["layers.0.attn_norm"].clone()
    gain[[3, 7]] = 0
    artifact = artifact_of(tmp_path / "a", manifest, layers__0__attn_norm=gain)
    summary = export_checkpoint(artifact, tmp_path / "e")
    assert summary.zero_gains == {"layers.0.qkv": 2} and summary.weight_format == "int4"
    query = load(tmp_path / "e")["model.layers.0.self_attn.q_proj.weight"]
    assert torch.isfinite(query).all() and (query[:, [3, 7]] == 0).all() and (query[:, 4] != 0).any()
    assert json.loads((tmp_path / "e" / "fut_export.json").read_text())["zero_gain_columns"] == {"layers.0.qkv": 2}


def test_division_uses_the_gain_as_it_is_exported(tmp_path: Path) -> None:
    """Else the rounding of a BF16 gain would stay in the product as an error of every weight of its column."""
    artifact = artifact_of(tmp_path / "a", make_manifest(formats=("bf16",)))
    export_checkpoint(artifact, tmp_path / "e", dtype="bf16")
    tensors = load(tmp_path / "e")
    gain = tensors["model.layers.0.input_layernorm.weight"].float()
    product = tensors["model.layers.0.self_attn.q_proj.weight"].float() * gain
    expected = artifact.dequantized("layers.0.qkv", "bf16")[: MODEL.q_size]
    torch.testing.assert_close(product, expected, rtol=2**-8, atol=0)


def test_unfold_gain() -> None:
    weight, zeros = unfold_gain(torch.tensor([[2.0, 0.0, -3.0]]), torch.tensor([4.0, 0.0, -1.0]))
    assert weight.tolist() == [[0.5, 0.0, 3.0]] and zeros == 1


def test_values_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    manifest = make_manifest()
    norm = torch.full((MODEL.hidden_size,), 1e6)
    artifact = artifact_of(tmp_path / "a", manifest, final_norm=norm)
    with pytest.raises(ArtifactError, match=r"model.norm.weight .* F16 cannot hold; export with --dtype f32"):
        export_checkpoint(artifact, tmp_path / "e", dtype="f16")
    tiny = torch.full((MODEL.hidden_size,), 1e-12)
    artifact = artifact_of(tmp_path / "b", manifest, layers__0__attn_norm=tiny)
    with pytest.raises(ArtifactError, match="rounds to zero"):
        export_checkpoint(artifact, tmp_path / "e", dtype="f16")
    assert not (tmp_path / "e").exists() and not (tmp_path / "e.partial").exists()


def test_refusals(tmp_path: Path) -> None:
    artifact = artifact_of(tmp_path / "a", make_manifest(formats=("int4",)))
    with pytest.raises(UnsupportedError, match="not as e4m3"):
        export_checkpoint(artifact, tmp_path / "e", weight_format="e4m3")
    with pytest.raises(UnsupportedError, match="expected one of bf16, f16, f32"):
        export_checkpoint(artifact, tmp_path / "e", dtype="f64")
    export_checkpoint(artifact, tmp_path / "e")
    with pytest.raises(ArtifactError, match="exists already"):
        export_checkpoint(artifact, tmp_path / "e")
    export_checkpoint(artifact, tmp_path / "e", overwrite=True)
    with pytest.raises(ArtifactError, match="will not be replaced"):
        export_checkpoint(artifact, tmp_path / "a", overwrite=True)


def test_side_files_shards_and_config(tmp_path: Path) -> None:
    config = {"hidden_size": 72, "torch_dtype": "float32", "quantization_config": {"a": 1}, "custom": [1]}
    side_files = {"config.json": json.dumps(config).encode(), "tokenizer.json": b"{}", "sub/x": b"y"}
    artifact = Artifact.open(write_artifact(tmp_path / "a", side_files=side_files))
    export_checkpoint(artifact, tmp_path / "e", max_shard_bytes=40_000)
    assert (tmp_path / "e" / "sub" / "x").read_bytes() == b"y"
    assert len(list((tmp_path / "e").glob("*.safetensors"))) > 2
    found = json.loads((tmp_path / "e" / "config.json").read_text())
    assert found == {"hidden_size": 72, "torch_dtype": "bfloat16", "custom": [1], "tie_word_embeddings": True}


def with_unit_norms(tensors: dict[str, Tensor], artifact: Artifact, weight_format: str) -> dict[str, Tensor]:
    """The same model written the other way: gains of one, and the artifact's folded matrices as they are."""
    result = dict(tensors)
    model = artifact.manifest.model
    for i in range(model.num_layers):
        prefix = f"model.layers.{i}"
        q, k, v = artifact.dequantized(f"layers.{i}.qkv", weight_format).split(
            [model.q_size, model.kv_size, model.kv_size]
        )
        gate, up = artifact.dequantized(f"layers.{i}.gate_up", weight_format).chunk(2)
        result |= {
            f"{prefix}.self_attn.q_proj.weight": q,
            f"{prefix}.self_attn.k_proj.weight": k,
            f"{prefix}.self_attn.v_proj.weight": v,
            f"{prefix}.mlp.gate_proj.weight": gate,
            f"{prefix}.mlp.up_proj.weight": up,
        }
        for norm in ("input_layernorm", "post_attention_layernorm"):
            result[f"{prefix}.{norm}.weight"] = torch.ones(model.hidden_size)
    if "head" in artifact.manifest.weights:
        result["lm_head.weight"] = artifact.dequantized("head", artifact.manifest.head)
        result["model.norm.weight"] = torch.ones(model.hidden_size)
    return result


@pytest.mark.parametrize(
    ("model", "weight_format", "head"),
    [
        (MODEL, "int4", "bf16"),
        (MODEL, "e4m3", "e4m3"),
        (replace(MODEL, qkv_bias=True, o_bias=True), "int4", "int4"),
        (QWEN2, "int4", "bf16"),
        (QWEN3, "bf16", "bf16"),
    ],
)
def test_transformers_loads_it_and_folding_does_not_show(
    tmp_path: Path, model: ModelSpec, weight_format: str, head: str
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    manifest = make_manifest(model, formats=(weight_format,), head=head)
    artifact = artifact_of(tmp_path / "a", manifest)
    export_checkpoint(artifact, tmp_path / "e", dtype="f32")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "e", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert type(loaded).__name__ == model.architecture
    tokens = torch.arange(20)[None] % model.vocab_size
    with torch.no_grad():
        logits = loaded.float()(tokens).logits
        other = with_unit_norms(load(tmp_path / "e"), artifact, weight_format)
        if "head" not in artifact.manifest.weights:
            other["lm_head.weight"] = other["model.embed_tokens.weight"]
        loaded.load_state_dict(other)
        folded = loaded(tokens).logits
    torch.testing.assert_close(logits, folded, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "rope",
    [
        RopeSpec(theta=5e5),
        RopeSpec(type="linear", factor=2.0),
        RopeSpec(type="dynamic", factor=4.0),
        RopeSpec(
            type="llama3",
            theta=5e5,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        RopeSpec(type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=32.0, beta_slow=1.0),
    ],
)
def test_config_made_from_the_manifest_is_understood(tmp_path: Path, rope: RopeSpec) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = replace(MODEL, rope=rope, eos_token_ids=(2, 3))
    (tmp_path / "config.json").write_text(json.dumps(config_of(model)))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.head_dim == 12 and config.eos_token_id == [2, 3]
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {
        **(config.rope_scaling or {"rope_type": "default"}),
        "rope_theta": config.rope_theta,
    }
    assert parameters["rope_type"] == rope.type and parameters["rope_theta"] == rope.theta
    if rope.factor is not None:
        assert parameters["factor"] == rope.factor
    transformers.AutoModelForCausalLM.from_config(config)
