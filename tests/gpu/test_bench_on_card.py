"""`fut-run bench` on the card: every mode gives times that are possible, and the lines say with what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from fut_runtime.cli import main


@pytest.mark.parametrize("mode", ["int4", "fp8", "bf16"])
def test_a_small_shape_is_measured_in_every_mode(mode: str, tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    options = ["--shape", "1b", "--layers", "4", "--mode", mode, "--batch", "1,5", "--context", "100,1024"]
    more = ["--sampling", "filtered", "--per-layer", "--no-peers", "--json", str(file)]
    run = CliRunner().invoke(main, ["bench", "decode", *options, *more])
    assert run.exit_code == 0, run.output
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["batch"], line["context"]) for line in lines] == [(1, 100), (1, 1024), (5, 100), (5, 1024)]
    for line in lines:
        assert 0 < line["floor_ms"] < line["step_ms"] < 50
        assert line["step_ms"] < line["host_ms"] * 1.2
        assert line["layer_us"] > 0
        assert 2000 < line["read_GB_per_s"] < 4900


def test_products_are_measured_beside_pytorch(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    run = CliRunner().invoke(main, ["bench", "gemm", "--shape", "1b", "--rows", "64,300", "--json", str(file)])
    assert run.exit_code == 0, run.output
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["module"], line["m"]) for line in lines][:3] == [("qkv", 64), ("qkv", 300), ("o", 64)]
    for line in lines:
        assert all(0 < us < 1000 for us in line["us"].values()) and all(0.1 < r < 10 for r in line["ratio"].values())


def test_w8a16_is_measured_with_every_tactic(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    options = ["--size", "4096", "2048", "--rows", "1,64", "--tactics", "--json", str(file)]
    run = CliRunner().invoke(main, ["bench", "w8a16", *options])
    assert run.exit_code == 0, run.output
    for line in (json.loads(line) for line in file.read_text().splitlines()):
        assert line["tile"] in line["tactics"] and 0 < line["read_share"] < 1.2 and 0 < line["host_us"] < 100


def test_attention_is_measured_beside_pytorch(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    options = ["--shape", "1b", "--prompts", "300,100+3x64", "--json", str(file)]
    run = CliRunner().invoke(main, ["bench", "attention", *options])
    assert run.exit_code == 0, run.output
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["case"] for line in lines] == ["300", "100+3x64"]
    for line in lines:
        assert {"fut_bf16", "fut_e4m3", "torch_flash"} <= set(line["us"])
        assert all(0 < us < 1000 for us in line["us"].values()) and all(0.1 < r < 10 for r in line["ratio"].values())


def test_prompts_are_measured(tmp_path: Path) -> None:
    file, plot = tmp_path / "lines.jsonl", tmp_path / "roof.png"
    options = ["--shape", "1b", "--tokens", "100,700", "--no-peers", "--first-token"]
    run = CliRunner().invoke(main, ["bench", "prefill", *options, "--plot", str(plot), "--json", str(file)])
    assert run.exit_code == 0, run.output
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["layer", "layer", "first_token", "first_token"]
    assert all(0 < us < 1000 for line in lines[:2] for us in line["us"].values())
    assert all(0 < ms < 100 for line in lines[2:] for ms in line["ms"].values())
    assert plot.read_bytes().startswith(b"\x89PNG")
