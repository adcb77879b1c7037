"""What is wrong with a model on the Hub, or with the place for its artifact, is found before weights are fetched."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fut_convert import convert, plan_conversion
from fut_convert.cli import main
from fut_convert.errors import PreflightError
from interrupted import RECIPES, sealed
from local_hub import LocalHub

Make = Callable[..., Path]
MODEL = "some/model"
QUICK = RECIPES["uncalibrated"]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def checkpoint(hub: LocalHub, tiny_checkpoint: Make) -> Path:
    path = tiny_checkpoint("model", layers=2, shards=3)
    hub.publish(MODEL, {p.name: p.read_bytes() for p in path.iterdir()})
    return path


def fetched_whole(hub: LocalHub) -> int:
    """How often a file of weights was asked for other than in parts."""
    return hub.count(r"GET .*\.safetensors$") - sum(name.endswith(".safetensors") for name, _, _ in hub.sent)


def cached_weights(tmp_path: Path) -> list[Path]:
    return [p for p in (tmp_path / "hub-cache").rglob("*.safetensors") if p.exists()]


def test_a_plan_reads_headers_only_and_is_that_of_the_whole(hub: LocalHub, checkpoint: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [MODEL, str(tmp_path / "out"), "--no-calibration", "--dry-run"])
    assert result.exit_code == 0 and "kB are yet to be fetched" in " ".join(result.output.split())
    plan = plan_conversion(MODEL, tmp_path / "out", overrides=QUICK).to_dict()
    assert fetched_whole(hub) == 0 and cached_weights(tmp_path) == []
    assert plan["fetch_bytes"] == sum(p.stat().st_size for p in checkpoint.glob("*.safetensors"))
    artifact = convert(MODEL, tmp_path / "artifact", overrides=QUICK, report=False)
    assert fetched_whole(hub) == 3
    whole = plan_conversion(MODEL, tmp_path / "out", overrides=QUICK).to_dict()
    # Free disk and free memory differ from one moment to the next.
    moving = ("fetch_bytes", "free_bytes", "available_memory_bytes")
    assert {k: v for k, v in plan.items() if k not in moving} == {k: v for k, v in whole.items() if k not in moving}
    assert whole["fetch_bytes"] == 0 and plan["output_bytes"] == artifact.plan.output_bytes


def refused(out: Path, **more: Any) -> str:
    with pytest.raises(PreflightError) as caught:
        convert(MODEL, out, overrides=QUICK, **more)
    with pytest.raises(PreflightError) as planned:
        plan_conversion(MODEL, out, overrides=QUICK, **more).require_feasible()
    assert str(planned.value) == str(caught.value)
    return str(caught.value)


def test_what_cannot_succeed_fetches_no_weights(hub: LocalHub, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    assert "taken: exists already" in refused(tmp_path / "taken")
    files = {p.name: p.read_bytes() for p in checkpoint.iterdir()}
    shard = "model-00002-of-00003.safetensors"
    hub.publish(MODEL, files | {shard: files[shard][:-100]})
    assert f"{shard}: truncated" in refused(tmp_path / "out")
    config = json.loads(files["config.json"])
    hub.publish(MODEL, files | {"config.json": json.dumps(config | {"vocab_size": 500}).encode()})
    assert "config and weights do not belong together" in refused(tmp_path / "out")
    assert fetched_whole(hub) == 0 and cached_weights(tmp_path) == []


@pytest.mark.filterwarnings("ignore:Not enough free disk space")
@pytest.mark.parametrize(
    ("free", "messages"),
    [
        (1000, ["its weights are 0.00 GB more in the Hub's cache, {cache}, and 0.00 GB are free there", "--stream"]),
        # Room for the one or the other, but not for both.
        (1_000_000, ["out: the artifact needs 0.6", "are free there"]),
    ],
)
def test_a_disk_too_small(
    free: int, messages: list[str], hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9 - free, free))
    said = refused(tmp_path / "out")
    for message in messages:
        assert message.format(cache=tmp_path / "hub-cache") in said
    assert fetched_whole(hub) == 0 and cached_weights(tmp_path) == []


def test_what_an_interrupted_download_has_left_is_not_counted_twice(checkpoint: Path, tmp_path: Path) -> None:
    before = plan_conversion(MODEL, tmp_path / "out", overrides=QUICK).fetch_bytes
    content = (checkpoint / "model-00002-of-00003.safetensors").read_bytes()
    (blobs,) = (tmp_path / "hub-cache").rglob("blobs")
    (blobs / f"{hashlib.sha256(content).hexdigest()}.incomplete").write_bytes(content[:100_000])
    assert plan_conversion(MODEL, tmp_path / "out", overrides=QUICK).fetch_bytes == before - 100_000


def test_a_hub_that_gives_no_parts_is_asked_for_the_whole(hub: LocalHub, tmp_path: Path) -> None:
    hub.ranges = False
    plan = plan_conversion(MODEL, tmp_path / "out", overrides=QUICK)
    assert plan.fetch_bytes == 0 and len(cached_weights(tmp_path)) == 3
    shutil.rmtree(tmp_path / "hub-cache")
    sealed(convert(MODEL, tmp_path / "out", overrides=QUICK, report=False).path)


def test_pickles_are_fetched_for_the_plan(hub: LocalHub, tiny_checkpoint: Make, tmp_path: Path) -> None:
    path = tiny_checkpoint("pickled", layers=1, pickled=True)
    hub.publish(MODEL, {p.name: p.read_bytes() for p in path.iterdir()})
    assert plan_conversion(MODEL, tmp_path / "out", overrides=QUICK).errors == ()
    assert hub.count(r"GET .*pytorch_model\.bin") == 1
