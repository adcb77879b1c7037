"""Whole conversions: what the artifact holds, against the checkpoint it came from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fut_convert import convert
from fut_convert.checkpoint_model import module_gain, module_weight
from fut_convert.quantize.fp8 import E4M3_MAX
from fut_convert.sources import open_source
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.spec import MODULES
from fut_runtime.artifact.verify import verify_artifact
from fut_runtime.reference import backend as reference
from odd_checkpoints import odd_input_ids

Make = Callable[..., Path]
#: Short calibration, so that a conversion takes a fraction of a second.
QUICK = {"calibration.windows": 2, "calibration.window_tokens": 64, "calibration.allow_few_tokens": True}


def converted(checkpoint: Path, out: Path, **overrides: object) -> Artifact:
    convert(str(checkpoint), out, overrides={**QUICK, **{k.replace("__", "."): v for k, v in overrides.items()}})
    return Artifact.open(out, verify=True)


def weights_and_gain(checkpoint: Path, layer: int, module: str) -> tuple[Tensor, Tensor]:
    """FP32 weight [out, in] and gain [in] (ones where no norm precedes) straight from the checkpoint."""
    with open_source(str(checkpoint)) as source:
        weight = module_weight(source.load, layer, module).float()
        gain = module_gain(source.load, layer, module)
    return weight, torch.ones(weight.shape[1]) if gain is None else gain


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", ["qwen2_biases", "intermediate_1568", "head_dim_80", "gqa_3_hidden_960"])
@pytest.mark.parametrize("gain", ["runtime", "folded"])
def test_stored_weights_are_the_checkpoints(name: str, gain: str, odd_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = odd_checkpoint(name)
    formats = ["e4m3", "int4", "bf16"]
    artifact = converted(checkpoint, tmp_path / "out", weights=formats, head="int4", int4__gain=gain)
    for module in MODULES:
        weight, norm_gain = weights_and_gain(checkpoint, 1, module)
        stored = f"layers.1.{module}"
        assert torch.equal(artifact.dequantized(stored, "bf16"), weight)
        folded = weight * norm_gain
        step = torch.maximum(folded.abs() * 2**-4, folded.abs().amax(1, keepdim=True) / E4M3_MAX * 2**-10)
        assert ((artifact.dequantized(stored, "e4m3") - folded).abs() <= step * 1.0001).all()
        expected = folded if gain == "folded" else weight
        # Normal weights in groups of 32 to 128, least squared error, lose 8 to 10 %; weighting by random activations
        # costs little more.
        assert 0.02 < relative(artifact.dequantized(stored, "int4"), expected) < 0.12


def test_padding_and_row_orders_are_recorded(odd_checkpoint: Make, tmp_path: Path) -> None:
    artifact = converted(odd_checkpoint("intermediate_1568"), tmp_path / "out", int4__group_size=128)
    weights = artifact.manifest.weights["layers.0.down"]
    assert weights["int4"].shape == (256, 1568) and weights["int4"].padded_shape == (256, 1664)
    assert weights["int4"].group_size == 128
    rows = {fmt: spec.row_order for fmt, spec in artifact.manifest.weights["layers.0.gate_up"].items()}
    assert rows == {"e4m3": "interleave1", "int4": "interleave8"}


def test_embedding_norms_biases_and_side_files_are_kept(odd_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = odd_checkpoint("qwen2_biases")
    artifact = converted(checkpoint, tmp_path / "out")
    with open_source(str(checkpoint)) as source:
        assert torch.equal(artifact.tensor("embed"), source.load("model.embed_tokens.weight"))
        assert torch.equal(artifact.tensor("final_norm"), source.load("model.norm.weight").float())
        assert torch.equal(
            artifact.tensor("layers.0.mlp_norm"), source.load("model.layers.0.post_attention_layernorm.weight").float()
        )
        biases = [source.load(f"model.layers.1.self_attn.{p}_proj.bias").float() for p in "qkv"]
    assert torch.equal(artifact.tensor("layers.1.qkv.bias"), torch.cat(biases))
    for name in ("tokenizer.json", "config.json", "generation_config.json"):
        assert (artifact.path / name).read_bytes() == (checkpoint / name).read_bytes()


@pytest.mark.parametrize(("tied", "head"), [(True, "bf16"), (True, "e4m3"), (False, "bf16"), (False, "int4")])
def test_heads(tied: bool, head: str, tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tied=tied)
    artifact = converted(checkpoint, tmp_path / "out", head=head)
    if tied and head == "bf16":
        assert "head" not in artifact.manifest.weights
        return
    with open_source(str(checkpoint)) as source:
        weight = source.load("model.embed_tokens.weight" if tied else "lm_head.weight").float()
        gain = source.load("model.norm.weight").float()
    spec = artifact.manifest.weights["head"][head]
    expected = weight * gain if spec.gain == "folded" else weight
    assert relative(artifact.dequantized("head", head), expected) < {"bf16": 1e-9, "e4m3": 0.04, "int4": 0.12}[head]


def test_calibrated_scales_cover_what_calibration_saw(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    artifact = converted(checkpoint, tmp_path / "out", activation__margin=1.0)
    assert artifact.manifest.activation.calibrated
    record = artifact.manifest.calibration
    assert record is not None and (record["windows"], record["window_tokens"]) == (2, 64)
    backend = reference.load(artifact, scale_mode="frozen")
    tokens = [int(t) for t in torch.randint(3, 384, (64,), generator=torch.Generator().manual_seed(0))]
    backend.prefill([(backend.open_request(64), tokens)])
    report = backend.activation_report()
    saturated, elements = torch.tensor(report["saturated"]), torch.tensor(report["elements"])
    assert (saturated / elements).max() < 0.02


def test_without_calibration_nothing_saturates(odd_checkpoint: Make, tmp_path: Path) -> None:
    artifact = converted(odd_checkpoint("base"), tmp_path / "out", calibration__enabled=False)
    assert not artifact.manifest.activation.calibrated and artifact.manifest.calibration is None
    backend = reference.load(artifact, scale_mode="frozen")
    backend.prefill([(backend.open_request(96), odd_input_ids()[0].tolist())])
    assert int(torch.tensor(backend.activation_report()["saturated"]).sum()) == 0


def test_sealed_files_are_reproducible(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    first, second = (converted(checkpoint, tmp_path / name) for name in ("first", "second"))
    assert first.files == second.files
    assert "conversion_log.json" not in first.files


def test_sharding_of_the_checkpoint_does_not_show(tiny_checkpoint: Make, tmp_path: Path) -> None:
    one = converted(tiny_checkpoint("one"), tmp_path / "out1")
    three = converted(tiny_checkpoint("three", shards=3), tmp_path / "out3")
    assert torch.equal(one.tensor("layers.1.down.int4"), three.tensor("layers.1.down.int4"))


def test_small_shards(tiny_checkpoint: Make, tmp_path: Path) -> None:
    artifact = converted(tiny_checkpoint(hidden=256, intermediate=512), tmp_path / "out", max_shard_gb=0.001)
    shards = sorted(p.stat().st_size for p in artifact.path.glob("*.safetensors"))
    assert len(shards) > 1 and shards[-1] <= 1_000_000
    assert verify_artifact(artifact.path).ok


@pytest.mark.reports
def test_the_result_reports_sizes_times_memory_and_errors(tiny_checkpoint: Make, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    out = tmp_path / "out"
    result = convert(str(tiny_checkpoint()), out, overrides=QUICK, progress=lambda *step: seen.append(step))
    assert result.path == out
    stored = sum(p.stat().st_size for p in out.glob("*.safetensors"))
    assert abs(stored - result.plan.output_bytes) < 0.1 * stored
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1]
    assert set(result.step_seconds) == {"plan", "read", "calibrate", "quantize", "write", "save", "seal", "report"}
    assert len(result.module_error) == 2 * 4 * 2 + 1
    assert 0.005 < result.module_error["layers.0.qkv.e4m3"] < 0.05
    assert 0.01 < result.module_error["layers.1.down.int4"] < 0.12
    log = json.loads((out / "conversion_log.json").read_text())
    assert log["module_error"] == result.module_error
    assert str(tmp_path) not in (out / "conversion_log.json").read_text()


def test_weighting_lowers_the_weighted_error(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = str(tiny_checkpoint())
    errors = {}
    for method in ("absmax_7", "search", "weighted_search"):
        result = convert(checkpoint, tmp_path / method, overrides={**QUICK, "int4.scale_method": method})
        errors[method] = sum(e for name, e in result.module_error.items() if name.endswith("int4"))
    assert errors["weighted_search"] < errors["search"] < errors["absmax_7"]
