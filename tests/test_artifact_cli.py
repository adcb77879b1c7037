"""fut-artifact: exit codes, JSON, tables, and messages instead of tracebacks."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from fut_runtime.artifact.cli import main
from fut_runtime.artifact.inspect import format_totals, tensor_rows
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.report import ByteProgress
from tiny_artifact import MODEL, make_manifest, random_tensors, write_artifact

SHARD = "model-00001-of-00001.safetensors"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return write_artifact(tmp_path / "art", side_files={"tokenizer.json": b"{}"})


@pytest.mark.parametrize("command", [[], ["inspect"], ["verify"], ["export"], ["repack"]])
def test_help_explains_exit_codes(command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0 and "Exit codes:" in result.output


def test_inspect_prints_tables(artifact: Path) -> None:
    result = run("inspect", artifact)
    assert result.exit_code == 0
    assert "layers.0-1.qkv.int4 " in result.output and "bits per weight" in result.output
    assert "LlamaForCausalLM, 2 layers" in result.output and "kind=synthetic" in result.output
    every = run("inspect", artifact, "--all")
    assert "layers.0.qkv.int4 " in every.output and "layers.1.qkv.int4 " in every.output


def test_inspect_json(artifact: Path) -> None:
    data = json.loads(run("inspect", artifact, "--json").stdout)
    opened = Artifact.open(artifact)
    assert [t["name"] for t in data["tensors"]] == [p.spec.name for p in opened.shards[SHARD]]
    assert data["model"]["hidden_size"] == 72 and data["head"] == "bf16"
    assert data["total_bytes"] == sum(f.size for f in opened.files.values())


def test_totals_add_up(artifact: Path) -> None:
    opened = Artifact.open(artifact)
    totals = {t.name: t for t in format_totals(opened)}
    data_bytes = sum(p.spec.nbytes for places in opened.shards.values() for p in places)
    assert sum(t.nbytes for t in totals.values()) == data_bytes
    assert sum(r.nbytes for r in tensor_rows(opened)) == data_bytes
    assert totals["int4"].weights == 2 * (120 * 72 + 72 * 72 + 200 * 72 + 72 * 100)
    assert totals["embedding"].bits_per_weight == 16


def test_bits_per_weight_of_a_large_matrix_is_that_of_the_format(tmp_path: Path) -> None:
    model = replace(MODEL, hidden_size=512, intermediate_size=1024, num_heads=8, head_dim=64, num_layers=1)
    opened = Artifact.open(write_artifact(tmp_path / "a", make_manifest(model)))
    (int4,) = (t for t in format_totals(opened) if t.name == "int4")
    assert int4.bits_per_weight == 4 + 16 / 128


def test_verify(artifact: Path) -> None:
    assert run("verify", artifact).exit_code == 0
    content = bytearray((artifact / SHARD).read_bytes())
    content[-5] ^= 16
    (artifact / SHARD).write_bytes(content)
    result = run("verify", artifact)
    assert result.exit_code == 1 and "chunk 0" in result.output and "damaged" in result.output
    report = run("verify", artifact, "--json")
    data = json.loads(report.stdout)
    assert report.exit_code == 1 and not data["ok"]
    assert data["findings"][0]["kind"] == "hash" and data["findings"][0]["file"] == SHARD
    for command in ("export", "repack"):
        refused = run(command, artifact, artifact.parent / "out")
        assert refused.exit_code == 1 and "chunk 0" in refused.output and "fut-artifact verify" in refused.output


def test_mistakes_end_in_messages(artifact: Path, tmp_path: Path) -> None:
    assert run("inspect", tmp_path / "nowhere").exit_code == 2
    assert run("frobnicate").exit_code == 2
    assert run("repack", artifact, tmp_path / "o", "--nibble-order", "mma/9").exit_code == 2
    result = run("inspect", tmp_path)
    assert result.exit_code == 1 and result.output.startswith("Error: ") and "not a FuTransformer" in result.output
    data = json.loads(run("verify", tmp_path, "--json").stdout)
    assert not data["ok"] and data["findings"][0]["kind"] == "not_an_artifact"
    result = run("export", artifact, artifact)
    assert result.exit_code == 1 and "exists already" in result.output


def test_export_says_what_it_did(tmp_path: Path) -> None:
    manifest = make_manifest()
    tensors = random_tensors(manifest)
    tensors["layers.1.mlp_norm"][5] = 0
    artifact = write_artifact(tmp_path / "art", manifest, tensors=tensors)
    result = run("export", artifact, tmp_path / "out", "--format", "e4m3", "--dtype", "f32")
    assert result.exit_code == 0 and "exported e4m3 weights as f32" in result.output
    assert "layers.1.gate_up: gains of its norm that are exactly zero: 1" in result.output


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("command", ["export", "repack"])
def test_an_interrupt_leaves_nothing(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, number: int, exit_code: int
) -> None:
    def interrupted(*_: object) -> None:
        assert (tmp_path / "out.partial").is_dir()
        os.kill(os.getpid(), number)

    monkeypatch.setattr(ByteProgress, "update", interrupted)
    result = run(command, artifact, tmp_path / "out")
    assert (result.exit_code, result.stderr) == (exit_code, "interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == [artifact.name]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_repack_there_and_back_gives_the_same_bytes(artifact: Path, tmp_path: Path) -> None:
    (artifact / "report.md").write_text("outside the sealed set")
    assert run("repack", artifact, tmp_path / "linear", "--nibble-order", "linear/1").exit_code == 0
    linear, original = Artifact.open(tmp_path / "linear", verify=True), Artifact.open(artifact)
    assert linear.manifest.weights["layers.0.o"]["int4"].nibble_order == "linear/1"
    assert not torch.equal(linear.tensor("layers.0.o.int4"), original.tensor("layers.0.o.int4"))
    for name in original.manifest.weights:
        assert torch.equal(linear.dequantized(name, "int4"), original.dequantized(name, "int4"))
    assert run("repack", tmp_path / "linear", tmp_path / "back").exit_code == 0
    for file in artifact.iterdir():
        if file.name != "report.md":
            assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize(("command", "replaced"), [("export", "fut_export.json"), ("repack", "fut_config.json")])
def test_an_artifact_inside_what_it_would_replace(tmp_path: Path, command: str, replaced: str) -> None:
    outer = tmp_path / "outer"
    inner = write_artifact(outer / "inner", side_files={})
    (outer / replaced).write_text("{}")
    result = run(command, inner, outer, "--overwrite")
    assert result.exit_code == 1 and "would be deleted with it" in result.stderr
    assert run("verify", inner).exit_code == 0


def test_repack_in_place(artifact: Path) -> None:
    before = Artifact.open(artifact).dequantized("layers.0.gate_up", "int4")
    assert run("repack", artifact, artifact, "--nibble-order", "mma_m16n8k16_a/1", "--overwrite").exit_code == 0
    after = Artifact.open(artifact, verify=True)
    assert torch.equal(after.dequantized("layers.0.gate_up", "int4"), before)
