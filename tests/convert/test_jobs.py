"""Layers converted side by side: the same bytes, the same errors, and no process left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from fut_convert import convert, plan_conversion, resume
from fut_convert.cli import main
from fut_convert.errors import CheckpointError, ConvertError, JobError
from fut_runtime.errors import ArtifactError
from interrupted import RECIPES, SHORT, interrupted, sealed, workers_alive
from killed_conversion import convert_and_kill
from quantized_checkpoints import gptq_config, gptq_parts, matrices_of, write_quantized
from synthetic_checkpoint import CheckpointShape, write_checkpoint

Make = Callable[..., Path]


@pytest.fixture
def save_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_SAVING_SHARE", 1e9)


def both(checkpoint: Path, tmp_path: Path, recipe: dict[str, Any], jobs: int, **more: Any) -> None:
    """Convert by one process and by several, and compare."""
    one = convert(str(checkpoint), tmp_path / "one", overrides=recipe, report=False)
    many = convert(str(checkpoint), tmp_path / "many", overrides=recipe, report=False, jobs=jobs, **more)
    assert sealed(many.path) == sealed(one.path)
    assert many.module_error == one.module_error and many.gptq == one.gptq
    assert not workers_alive()


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_the_bytes_are_those_of_one_process(recipe: str, tiny_checkpoint: Make, tmp_path: Path) -> None:
    both(tiny_checkpoint(layers=5, family="qwen3"), tmp_path, RECIPES[recipe], 3)


@pytest.mark.parametrize("recipe", [RECIPES["uncalibrated"], {**SHORT, "weights": ["int4", "e4m3", "bf16"]}])
def test_a_quantized_checkpoint(recipe: dict[str, Any], tmp_path: Path) -> None:
    write_quantized(tmp_path / "model", matrices_of(64), partial(gptq_parts, version=1), gptq_config(64), layers=3)
    both(tmp_path / "model", tmp_path, recipe, 2)


def test_pickled_weights_and_more_processes_than_layers(tiny_checkpoint: Make, tmp_path: Path) -> None:
    both(tiny_checkpoint(pickled=True, layers=2), tmp_path, RECIPES["uncalibrated"], 4)


def test_an_interrupted_one_goes_on_with_another_number(
    tiny_checkpoint: Make, tmp_path: Path, save_every_layer: None
) -> None:
    checkpoint, out = tiny_checkpoint(layers=4), tmp_path / "out"
    interrupted(checkpoint, out, RECIPES["rtn"], 2, jobs=2)
    result = convert(str(checkpoint), out, overrides=RECIPES["rtn"], report=False)
    assert result.resumed_layers == 2
    assert sealed(out) == sealed(convert(str(checkpoint), tmp_path / "one", overrides=RECIPES["rtn"]).path)


@pytest.mark.parametrize("share", [0.6])
def test_a_killed_one_takes_its_processes_along(share: float, tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint, out = tiny_checkpoint(layers=4), tmp_path / "out"
    kill = partial(convert_and_kill, checkpoint, jobs=2, report=False)
    total = kill(tmp_path / "counted", RECIPES["uncalibrated"], None)
    assert total is not None
    assert kill(out, RECIPES["uncalibrated"], int(share * total)) is None
    deadline = time.monotonic() + 30
    while True:  # they hold the lock until they are dead themselves, a moment later
        try:
            convert(str(checkpoint), out, overrides=RECIPES["uncalibrated"], jobs=2, report=False)
            break
        except ArtifactError as error:
            assert "is being written by another process" in str(error) and time.monotonic() < deadline
    (out / ".fut_lock").unlink(missing_ok=True)
    assert sealed(out) == sealed(tmp_path / "counted")


def test_an_error_is_what_it_is_without(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.mlp.up_proj.weight"][3, 4] = float("nan")

    path = write_checkpoint(tmp_path / "model", CheckpointShape(layers=4), spoil)
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.up_proj\.weight holds 1 values that are not finite"):
        convert(str(path), tmp_path / "out", overrides=RECIPES["uncalibrated"], jobs=2)
    assert not workers_alive()
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_process_that_dies_loses_no_layers(
    tiny_checkpoint: Make, tmp_path: Path, save_every_layer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, out = tiny_checkpoint(layers=6), tmp_path / "out"

    def kill_one(done: int, _: int, __: str) -> None:
        if done == 4:
            os.kill(workers_alive()[0].pid, signal.SIGKILL)

    with pytest.raises(JobError, match=r"ended by signal 9; where the system ran out of memory, a smaller --jobs"):
        convert(str(checkpoint), out, overrides=RECIPES["uncalibrated"], jobs=2, progress=kill_one)
    assert not workers_alive()
    result = convert(str(checkpoint), out, overrides=RECIPES["uncalibrated"], jobs=2, report=False)
    assert result.resumed_layers is not None and result.resumed_layers >= 2
    assert sealed(out) == sealed(convert(str(checkpoint), tmp_path / "one", overrides=RECIPES["uncalibrated"]).path)


def test_the_plan_counts_their_memory_and_the_program_takes_them(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    one, three = (
        plan_conversion(str(checkpoint), tmp_path / "out", overrides=RECIPES["rtn"], jobs=jobs) for jobs in (1, 3)
    )
    assert three.memory_bytes - one.memory_bytes > 3 * 300_000_000
    arguments = [str(checkpoint), str(tmp_path / "out"), "--no-calibration", "--jobs", "2", "--no-report"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    taken = convert(str(checkpoint), tmp_path / "more", overrides=RECIPES["uncalibrated"], jobs=2, report=False)
    alone = convert(str(checkpoint), tmp_path / "one", overrides=RECIPES["uncalibrated"], report=False)
    assert taken.peak_memory_bytes > alone.peak_memory_bytes + 2 * 100_000_000
    # What this process, the tests', has in memory besides is not the conversion's.
    assert taken.peak_memory_bytes - alone.peak_memory_bytes < taken.plan.memory_bytes - alone.plan.memory_bytes


def test_refusals(tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = str(tiny_checkpoint())
    with pytest.raises(ConvertError, match="jobs is 0"):
        convert(checkpoint, tmp_path / "out", jobs=0)
    with pytest.raises(ConvertError, match="of which --stream has one"):
        convert("some/model", tmp_path / "out", jobs=2, stream=True)
    monkeypatch.setattr("fut_convert.pipeline.torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("fut_convert.pipeline.torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConvertError, match="a GPU converts one after the other"):
        convert(checkpoint, tmp_path / "out", jobs=2, device="cuda")
    monkeypatch.setattr("fut_convert.child_process.subprocess.Popen", _cannot_start)
    with pytest.raises(JobError, match=r"cannot be started \(Cannot allocate memory\)"):
        convert(checkpoint, tmp_path / "out", overrides=RECIPES["uncalibrated"], jobs=2)


def _cannot_start(*_: object, **__: object) -> None:
    raise OSError(12, "Cannot allocate memory")
