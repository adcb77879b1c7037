"""Activations on the device, in host memory and on the disk, and conversions that keep them there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from fut_convert import activation_store, convert, plan_conversion
from fut_convert.activation_store import PLACES, ActivationStore
from fut_convert.cli import main
from fut_convert.errors import ConvertError
from fut_runtime.artifact.reader import Artifact
from fut_runtime.errors import ArtifactError

Make = Callable[..., Path]
CPU = torch.device("cpu")
OPTIONS = {
    "int4.method": "gptq", "head": "int4", "calibration.windows": 5, "calibration.window_tokens": 48,
    "calibration.allow_few_tokens": True,
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_what_is_stored_is_loaded_and_restored(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_store, "_CHUNK_BYTES", 2 * 3 * 8 * 2 + 1)
    values = torch.randn(7, 3, 8)
    store = ActivationStore((7, 3, 8), CPU, place, tmp_path / "work" if place == "disk" else None)
    for windows in (slice(4, 7), slice(0, 4)):
        store.store(windows, values[windows].flatten(0, 1))
    expected = values.bfloat16()
    assert torch.equal(store.load(slice(2, 5)), expected[2:5])
    parts = list(store.parts(slice(0, 7)))
    assert len(parts) == 4 and torch.equal(torch.cat(parts), expected)
    saved = tmp_path / "saved"
    saved.write_bytes(b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts))
    other = ActivationStore((7, 3, 8), CPU, place, tmp_path / "other" if place == "disk" else None)
    other.restore(saved, [(slice(0, 7), slice(0, 7))])
    assert torch.equal(other.load(slice(0, 7)), expected)
    other.restore(saved, [(slice(5, 7), slice(0, 2)), (slice(1, 2), slice(2, 3))])
    assert torch.equal(other.load(slice(0, 4)), expected[[5, 6, 1, 3]])
    saved.write_bytes(saved.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="saved: cannot be read"):
        other.restore(saved, [(slice(0, 7), slice(0, 7))])
    for used in (store, other):
        used.close()
        used.close()
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


def test_where_activations_are_changes_no_byte(
    tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, kept = str(tiny_checkpoint()), set()
    made = ActivationStore.__init__

    def watched(self: ActivationStore, shape: Any, device: Any, place: str = "device", path: Any = None) -> None:
        kept.add(place)
        made(self, shape, device, place, path)

    monkeypatch.setattr(ActivationStore, "__init__", watched)
    in_memory = convert(checkpoint, tmp_path / "a", overrides=OPTIONS)
    assert in_memory.plan.memory.place == "device" and kept == {"device"}
    kept.clear()
    on_disk = convert(checkpoint, tmp_path / "b", overrides=OPTIONS, host_memory=0.01)
    assert on_disk.plan.memory.place == "disk" and kept == {"disk"}
    assert any("GB of memory, and 0.0 GB are free" in w for w in on_disk.plan.warnings)
    assert Artifact.open(tmp_path / "a").files == Artifact.open(tmp_path / "b").files
    assert not list((tmp_path / "b").glob(".*"))


def test_the_plan_counts_what_lies_beside_the_artifact(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = str(tiny_checkpoint(hidden=128))
    plans = [plan_conversion(checkpoint, tmp_path / "out", overrides=OPTIONS, host_memory=gb) for gb in (None, 0.01)]
    states = 2 * 5 * 48 * 128
    assert plans[0].memory.activation_bytes == 4 * states
    # Hidden states of both calibrations, those saved before and those being saved; on the disk all of them once more.
    assert [plan.scratch_bytes for plan in plans] == [4 * states, 4 * states + 4 * states]
    none = plan_conversion(checkpoint, tmp_path / "out", overrides={"calibration.enabled": False})
    assert (none.scratch_bytes, none.memory.activation_bytes) == (0, 0)


def test_the_program_takes_budgets(tiny_checkpoint: Make, tmp_path: Path) -> None:
    arguments = [str(tiny_checkpoint()), str(tmp_path / "out"), "--dry-run", "--calibration-windows", "5"]
    assert "of all windows: 2.6 MB in memory" in CliRunner().invoke(main, arguments).stdout
    result = CliRunner().invoke(main, [*arguments, "--host-memory", "0.05", "--device-memory", "1"])
    assert "2.6 MB on the disk" in result.stdout and "and 0.1 GB are free" in " ".join(result.stdout.split())
    assert CliRunner().invoke(main, [*arguments, "--host-memory", "0"]).exit_code == 2
    with pytest.raises(ConvertError, match="expected a number of GB above 0"):
        plan_conversion(arguments[0], arguments[1], host_memory=float("nan"))
