"""`fut-run bench decode` on the card: every mode gives times that are possible, and the lines say with what."""

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
