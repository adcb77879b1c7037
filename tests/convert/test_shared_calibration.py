"""Calibration windows shared out over several processes: the same bytes with any number of them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fut_convert import convert, plan_conversion, resume
from fut_convert.cli import main
from fut_convert.errors import ConvertError, JobError
from fut_convert.lanes import LANES, Lanes
from fut_runtime.errors import ArtifactError
from interrupted import RECIPES, interrupted, sealed, workers_alive
from killed_conversion import convert_and_kill
from quantized_checkpoints import gptq_config, gptq_parts, matrices_of, write_quantized

Make = Callable[..., Path]
MANY: dict[str, Any] = {
    "calibration.windows": 19, "calibration.window_tokens": 40, "calibration.allow_few_tokens": True,
}  # fmt: skip
GPTQ = {**MANY, "int4.method": "gptq", "head": "int4"}


@pytest.fixture
def save_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_SAVING_SHARE", 1e9)


@given(st.integers(1, 300), st.integers(1, LANES))
def test_every_window_is_in_one_lane_of_one_process(windows: int, wanted: int) -> None:
    processes = Lanes.processes(windows, wanted)
    ids = torch.arange(windows)
    lanes = [Lanes(windows, rank, processes) for rank in range(processes)]
    own = [each.windows(ids) for each in lanes]
    assert [each.count for each in lanes] == [len(part) for part in own]
    assert all(each.own for each in lanes) and len(list(lanes[0].places())) <= LANES
    found = torch.cat([own[owner][place] for _, owner, place in lanes[0].places()])
    assert torch.equal(found, ids)
    assert all(torch.equal(ids[lane], own[owner][place]) for lane, owner, place in lanes[0].places())


def test_sums_are_added_lane_by_lane() -> None:
    values = torch.rand(21, generator=torch.Generator().manual_seed(0)) * 1e6
    lanes = Lanes(21)
    (total,) = lanes.total([sum(values[lane], torch.zeros(()))] for lane in lanes.own)
    expected = torch.zeros(())
    for first in range(0, 21, 3):
        expected = expected + (values[first] + values[first + 1] + values[first + 2])
    assert torch.equal(total, expected)
    with pytest.raises(ValueError, match="more sums than lanes"):
        lanes.total([torch.zeros(())] for _ in range(LANES + 1))


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize(
    "recipe",
    [{**MANY, "head": "int4"}, GPTQ, {**GPTQ, "kv_cache.fold_v": True, "gptq.correction": 0.0}],
    ids=["rtn", "gptq", "folded"],
)
def test_the_bytes_are_those_of_one_process(
    recipe: dict[str, Any], processes: int, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    checkpoint, hook = str(tiny_checkpoint(layers=2, family="qwen3")), sys.excepthook
    one = convert(checkpoint, tmp_path / "one", overrides=recipe, report=False)
    many = convert(checkpoint, tmp_path / "many", overrides=recipe, report=False, calibration_processes=processes)
    assert sealed(many.path) == sealed(one.path)
    assert many.gptq == one.gptq and many.module_error == one.module_error
    assert not workers_alive() and not dist.is_initialized() and sys.excepthook is hook


def test_kept_codes_other_jobs_and_activations_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_quantized(tmp_path / "model", matrices_of(64), partial(gptq_parts, version=1), gptq_config(64), layers=2)
    one = convert(str(tmp_path / "model"), tmp_path / "one", overrides=GPTQ, report=False)
    many = convert(
        str(tmp_path / "model"), tmp_path / "many", overrides=GPTQ, report=False, calibration_processes=2, jobs=2,
        host_memory=0.001,
    )  # fmt: skip
    assert many.plan.memory.place == "disk" and one.plan.memory.place == "device"
    assert sealed(many.path) == sealed(one.path)


@pytest.mark.parametrize(("first", "then"), [(3, 1), (1, 2), (2, 3)])
def test_an_interrupted_one_goes_on_with_another_number(
    first: int, then: int, tiny_checkpoint: Make, tmp_path: Path, save_every_layer: None
) -> None:
    checkpoint, out = tiny_checkpoint(layers=3), tmp_path / "out"
    interrupted(checkpoint, out, GPTQ, 2, calibration_processes=first)
    result = convert(str(checkpoint), out, overrides=GPTQ, report=False, calibration_processes=then)
    assert result.resumed_layers == 2 and not workers_alive()
    whole = convert(str(checkpoint), tmp_path / "one", overrides=GPTQ, report=False)
    assert sealed(out) == sealed(whole.path) and result.gptq == whole.gptq


def test_a_killed_one_goes_on(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint, out = tiny_checkpoint(layers=3), tmp_path / "out"
    kill = partial(convert_and_kill, checkpoint, calibration_processes=2, report=False)
    total = kill(tmp_path / "counted", GPTQ, None)
    assert total is not None and kill(out, GPTQ, 2 * total // 3) is None
    for _ in range(1000):  # until the other process is dead, too
        try:
            convert(str(checkpoint), out, overrides=GPTQ, report=False)
            break
        except ArtifactError as error:
            assert "is being written by another process" in str(error)
    (out / ".fut_lock").unlink(missing_ok=True)
    assert sealed(out) == sealed(tmp_path / "counted")


def test_a_process_that_dies_loses_no_layers(tiny_checkpoint: Make, tmp_path: Path, save_every_layer: None) -> None:
    checkpoint, out = tiny_checkpoint(layers=4), tmp_path / "out"

    def kill_one(done: int, _: int, __: str) -> None:
        if done == 3:
            os.kill(workers_alive()[0].pid, signal.SIGKILL)

    with pytest.raises(JobError, match=r"a process of --calibration-processes was ended by signal 9"):
        convert(str(checkpoint), out, overrides=GPTQ, calibration_processes=3, progress=kill_one)
    assert not workers_alive() and not dist.is_initialized()
    result = convert(str(checkpoint), out, overrides=GPTQ, report=False)
    assert result.resumed_layers == 2
    assert sealed(out) == sealed(convert(str(checkpoint), tmp_path / "one", overrides=GPTQ, report=False).path)


def test_what_one_of_them_cannot_read_is_said(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint, out = tiny_checkpoint(layers=3), tmp_path / "out"

    def take_away(done: int, _: int, __: str) -> None:
        if done == 0:  # this process has opened the file, the other one has not
            (checkpoint / "model.safetensors").rename(tmp_path / "gone")

    with pytest.raises(ConvertError, match="no weights; expected one of"):
        convert(str(checkpoint), out, overrides=GPTQ, calibration_processes=2, progress=take_away)
    assert not workers_alive()


def test_an_activation_that_overflows_ends_all_of_them(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"].fill_(3e38)
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(ConvertError, match="not finite"):
        convert(str(checkpoint), tmp_path / "out", overrides=GPTQ, calibration_processes=2)
    assert not workers_alive() and [p.name for p in tmp_path.iterdir()] == [checkpoint.name]


def test_the_plan_counts_them(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = str(tiny_checkpoint())
    one, four = (plan_conversion(checkpoint, tmp_path / "out", overrides=GPTQ, calibration_processes=n) for n in (1, 4))
    assert four.memory_bytes - one.memory_bytes > 3 * 300_000_000
    assert four.scratch_bytes == one.scratch_bytes
    assert four.memory.activation_bytes == one.memory.activation_bytes


def test_refusals(tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, out = str(tiny_checkpoint()), tmp_path / "out"
    with pytest.raises(ConvertError, match="calibration_processes is 9, expected 1 to 8"):
        convert(checkpoint, out, calibration_processes=9)
    with pytest.raises(ConvertError, match="--stream has a part of it only"):
        convert("some/model", out, calibration_processes=2, stream=True)
    result = CliRunner().invoke(main, [checkpoint, str(out), "--calibration-processes", "0"])
    assert result.exit_code == 2
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with pytest.raises(ConvertError, match="not under torchrun"):
        convert(checkpoint, out, overrides=RECIPES["gptq"], calibration_processes=2)
    monkeypatch.setattr("fut_convert.pipeline.torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("fut_convert.pipeline.torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConvertError, match=r"takes a CUDA device for each, from cuda:1 on; PyTorch sees 2"):
        convert(checkpoint, out, calibration_processes=2, device="cuda:1")
