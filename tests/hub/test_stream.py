"""Conversions that fetch their checkpoint from the Hub while they run."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from fut_convert import convert, plan_conversion, resume
from fut_convert.cli import main
from fut_convert.errors import CheckpointError, ConvertError, HubError, ReadError, UnsupportedModelError
from fut_convert.plan import Plan
from fut_convert.sources import hub_file, shard_store
from fut_runtime.artifact.remains import clear_behind_renaming
from fut_runtime.errors import FutError
from hub_client import use_hub
from interrupted import RECIPES, interrupted, sealed
from killed_conversion import convert_and_kill
from local_hub import Fault, LocalHub
from quantized_checkpoints import gptq_config, gptq_parts, matrices_of, write_quantized
from synthetic_checkpoint import CheckpointShape, write_checkpoint

Make = Callable[..., Path]
MODEL = "some/model"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_file, "PART_BYTES", 10_000)
    monkeypatch.setattr(resume, "_SAVING_SHARE", 1e9)


def publish(hub: LocalHub, path: Path) -> dict[str, bytes]:
    files = {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}
    hub.publish(MODEL, files)
    return files


def resharded(path: Path, shards: list[list[str]]) -> None:
    """Put the tensors of a single file into several, those whose names match the patterns of each."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    where = {}
    for number, patterns in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        names = [n for n in tensors if n not in where and any(re.search(p, n) for p in patterns)]
        save_file({name: tensors[name] for name in names}, path / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    assert where.keys() == tensors.keys()
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def shards_of(files: Mapping[str, bytes]) -> dict[str, int]:
    return {name: len(data) for name, data in files.items() if name.endswith(".safetensors")}


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Iterator[list[int]]:
    """The most bytes of the checkpoint that were on the disk at once, looked at before anything goes or has come."""
    peak = [0]

    def look() -> None:
        files = [*directory.rglob("input/*"), *directory.glob("hub-cache/**/blobs/*")]
        sizes = [p.stat().st_size for p in files if p.is_file()]
        peak[0] = max(peak[0], sum(sizes))

    def looking(target: Any, name: str) -> None:
        original = getattr(target, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            look()
            try:
                return original(*args, **kwargs)
            finally:
                look()

        monkeypatch.setattr(target, name, call)

    looking(shard_store.os, "replace")
    looking(hub_file, "write_all")
    looking(shard_store.ShardStore, "_copy")
    yield peak


def stream(out: Path, recipe: Mapping[str, Any], **more: Any) -> tuple[dict[str, bytes], Plan]:
    plans: list[Plan] = []
    result = convert(MODEL, out, overrides=recipe, stream=True, on_plan=plans.append, report=False, **more)
    return sealed(result.path), plans[0]


def whole(out: Path, recipe: Mapping[str, Any]) -> dict[str, bytes]:
    """The artifact of the same checkpoint, fetched before it is converted."""
    return sealed(convert(MODEL, out, overrides=recipe, report=False).path)


LAYERS = [[rf"layers\.{i}\."] for i in range(6)]
#: The embedding before the first layers, norm and head behind the last, as most models have it; all in the wrong order;
#: matrices of a layer in two files.
LAYOUTS = {
    "in_order": [["embed", r"layers\.0"], [r"layers\.1"], [r"layers\.2"], [r"layers\.3"], [r"layers\.4"], ["."]],
    "reversed": [["lm_head"], [r"^model\.norm"], *reversed(LAYERS), ["."]],
    "torn": [["embed", "layers.0.mlp"], [r"layers\.[01]\..*attn"], [r"layers\.[123]"], ["mlp"], ["."]],
}


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_the_artifact_is_the_same_and_the_checkpoint_never_there(
    layout: str, recipe: str, hub: LocalHub, tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint(layers=6)
    resharded(checkpoint, LAYOUTS[layout])
    files = publish(hub, checkpoint)
    sizes = shards_of(files)
    with watched(monkeypatch, tmp_path) as peak:
        found, plan = stream(tmp_path / "streamed", RECIPES[recipe])
    assert plan.stream is not None and plan.stream.fetched_bytes <= sum(sizes.values())
    assert 0 < peak[0] - small_files(files) <= plan.stream.peak_bytes + 4000
    if layout == "in_order":
        assert plan.stream.peak_bytes < 0.7 * sum(sizes.values())
    whole_parts = [(n, a, b) for n, a, b in hub.sent if a % 10_000 == 0 and b in (a + 10_000, sizes[n])]
    assert len(set(whole_parts)) == len(whole_parts), "a part was fetched twice"
    # Headers and vectors come by themselves before their shard does, and not even in small files are they much.
    assert sum(b - a for _, a, b in hub.sent) < 1.4 * sum(sizes.values())
    expected = whole(tmp_path / "whole", RECIPES[recipe])
    assert found == expected


def small_files(files: Mapping[str, bytes]) -> int:
    return sum(len(data) for name, data in files.items() if not name.endswith(".safetensors"))


@pytest.mark.parametrize("head", ["e4m3", "bf16"])
def test_a_tied_embedding_is_kept_for_the_head(head: str, hub: LocalHub, tiny_checkpoint: Make, tmp_path: Path) -> None:
    publish(hub, tiny_checkpoint(layers=4, tied=True, shards=4))
    recipe = {**RECIPES["rtn"], "head": head}
    found, _ = stream(tmp_path / "streamed", recipe)
    assert found == whole(tmp_path / "whole", recipe)


def test_a_quantized_checkpoint_streams(hub: LocalHub, tmp_path: Path) -> None:
    write_quantized(
        tmp_path / "model", matrices_of(64), partial(gptq_parts, version=1), gptq_config(64), layers=3, shards=4
    )
    publish(hub, tmp_path / "model")
    for name in ("uncalibrated", "gptq"):
        found, _ = stream(tmp_path / f"streamed-{name}", RECIPES[name])
        assert found == whole(tmp_path / f"whole-{name}", RECIPES[name])


@pytest.mark.parametrize(
    "fault",
    [
        Fault("GET .*/model-00002", cut=1000, times=2, skip=2),
        Fault("GET .*/model-00003", 503, skip=1),
        Fault("GET .*/model-0000.*", 429, {"Retry-After": "3"}, skip=5),
        Fault("GET .*/model-00002", corrupt=True, skip=2),
    ],
    ids=["cut", "503", "429", "corrupt"],
)
def test_passing_faults_do_no_harm(
    fault: Fault, hub: LocalHub, tiny_checkpoint: Make, tmp_path: Path, waits: list[float]
) -> None:
    publish(hub, tiny_checkpoint(layers=3, shards=4))
    expected = whole(tmp_path / "whole", RECIPES["uncalibrated"])
    shutil.rmtree(tmp_path / "hub-cache")
    hub.faults = [replace(fault)]
    found, _ = stream(tmp_path / "streamed", RECIPES["uncalibrated"])
    assert found == expected and hub.faults[0].times == 0


@pytest.mark.parametrize("recipe", ["uncalibrated", "gptq"])
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (Fault("GET .*/model-00004", corrupt=True, times=99, skip=1), ReadError, "does not have the hash"),
        (Fault("GET .*/model-00004", 500, times=99, skip=1), HubError, "answered HTTP 500"),
        (Fault("GET .*/model-00004", cut=0, times=99, skip=1), HubError, "was cut again and again"),
    ],
    ids=["corrupt", "500", "cut"],
)
def test_what_cannot_be_fetched_stops_the_conversion_and_it_goes_on_later(
    recipe: str, fault: Fault, error: type[FutError], message: str, hub: LocalHub, tiny_checkpoint: Make,
    tmp_path: Path, waits: list[float],
) -> None:  # fmt: skip
    publish(hub, tiny_checkpoint(layers=6, shards=5))
    hub.faults = [replace(fault)]
    with pytest.raises(error, match=message):
        stream(tmp_path / "out", RECIPES[recipe])
    hub.faults, before = [], len(hub.sent)
    result = convert(MODEL, tmp_path / "out", overrides=RECIPES[recipe], stream=True)
    assert result.resumed_layers is not None and result.resumed_layers >= 1
    # The shards that are done with are not fetched again.
    assert not any(name.startswith("model-00001") and b - a == 10_000 for name, a, b in hub.sent[before:])
    assert sealed(result.path) == whole(tmp_path / "whole", RECIPES[recipe])


@pytest.mark.parametrize("recipe", ["uncalibrated", "gptq"])
def test_one_that_is_killed_goes_on_and_ends_with_the_same_bytes(
    recipe: str, hub: LocalHub, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(layers=4)
    resharded(checkpoint, [*LAYOUTS["torn"][:3], ["."]])
    publish(hub, checkpoint)
    expected = whole(tmp_path / "whole", RECIPES[recipe])
    prepare = partial(use_hub, constants.ENDPOINT, tmp_path / "child")
    kill = partial(convert_and_kill, MODEL, prepare=prepare, stream=True, report=False)
    total = kill(tmp_path / "counted", RECIPES[recipe], None)
    assert total is not None and sealed(tmp_path / "counted") == expected
    draw = random.Random(recipe)
    gone_on = set()
    for point in sorted(draw.randrange(1, total) for _ in range(10)):
        out = tmp_path / f"killed-at-{point}"
        kill(out, RECIPES[recipe], point)
        if not out.exists():
            result = convert(MODEL, out, overrides=RECIPES[recipe], stream=True, report=False)
            gone_on.add(result.resumed_layers)
        clear_behind_renaming(out)
        assert sealed(out) == expected, point
    assert len(gone_on) > 2


def test_one_that_was_streamed_may_go_on_without_and_the_other_way_round(
    hub: LocalHub, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    publish(hub, tiny_checkpoint(layers=4, shards=4))
    for name, first in (("streamed-first", True), ("whole-first", False)):
        interrupted(MODEL, tmp_path / name, RECIPES["rtn"], 2, stream=first)
        result = convert(MODEL, tmp_path / name, overrides=RECIPES["rtn"], stream=not first)
        assert result.resumed_layers == 2
        shutil.rmtree(tmp_path / "hub-cache")
    assert sealed(tmp_path / "streamed-first") == sealed(tmp_path / "whole-first")


def test_what_is_damaged_while_nothing_runs_is_fetched_again(
    hub: LocalHub, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    publish(hub, tiny_checkpoint(layers=6, tied=True, shards=4))
    recipe = {**RECIPES["rtn"], "head": "e4m3"}
    expected = whole(tmp_path / "whole", recipe)
    shutil.rmtree(tmp_path / "hub-cache")
    out, left = tmp_path / "out", tmp_path / "out.partial" / ".fut_progress" / "input"
    interrupted(MODEL, out, recipe, 3, stream=True, report=False)
    # The embedding is kept for the head.
    assert {"shard-00000.rest", "shard-00002"} <= {p.name for p in left.iterdir()}
    for name in ("shard-00000.rest", "shard-00002"):
        data = bytearray((left / name).read_bytes())
        data[-1] ^= 1
        (left / name).write_bytes(data)
    before = len(hub.sent)
    found, _ = stream(out, recipe)
    assert found == expected
    fetched = {n for n, a, b in hub.sent[before:] if b - a == 10_000}
    assert {"model-00001-of-00004.safetensors", "model-00003-of-00004.safetensors"} <= fetched


@pytest.mark.parametrize("streaming", [False, True])
def test_a_branch_that_has_moved_on_is_gone_back_from(
    streaming: bool, hub: LocalHub, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    files = publish(hub, tiny_checkpoint(layers=3, shards=3))
    first = hub.repos[MODEL].branches["main"][-1][0]
    interrupted(MODEL, tmp_path / "out", RECIPES["uncalibrated"], 2, stream=streaming)
    hub.publish(MODEL, files | {"LICENSE": b"other"}, message="second")
    with pytest.raises(FutError, match=rf'begun otherwise \(.*source.commit was "{first}" and is'):
        convert(MODEL, tmp_path / "out", overrides=RECIPES["uncalibrated"], stream=streaming)
    result = convert(
        MODEL, tmp_path / "out", overrides=RECIPES["uncalibrated"], stream=streaming, revision=first, report=False
    )
    assert result.resumed_layers == 2
    expected = convert(MODEL, tmp_path / "whole", overrides=RECIPES["uncalibrated"], revision=first, report=False)
    assert sealed(result.path) == sealed(expected.path)


def test_the_program_streams_and_says_what_it_takes(hub: LocalHub, tiny_checkpoint: Make, tmp_path: Path) -> None:
    files = publish(hub, tiny_checkpoint(layers=4, shards=5))
    arguments = [MODEL, str(tmp_path / "out"), "--stream", "--no-calibration", "--scale-method", "absmax_7"]
    result = CliRunner().invoke(main, [*arguments, "--dry-run"])
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert re.search(r"streamed from the Hub: .* MB in 5 files, each fetched once; at most .* kB on the disk", said)
    result = CliRunner().invoke(main, [*arguments, "--dry-run", "--json"])
    planned = json.loads(result.stdout)["stream"]
    assert planned["shards"] == 5 and planned["fetched_bytes"] == sum(shards_of(files).values())
    assert planned["peak_bytes"] < planned["fetched_bytes"]
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0 and "fetch" in json.loads(result.stdout)["step_seconds"]
    assert "kept nothing of the checkpoint to measure against" in (tmp_path / "out" / "report.md").read_text()


def test_the_plan_counts_the_disk(hub: LocalHub, tiny_checkpoint: Make, tmp_path: Path) -> None:
    publish(hub, tiny_checkpoint(layers=4, shards=5))
    streamed, fetched = (
        plan_conversion(MODEL, tmp_path / "out", overrides=RECIPES["rtn"], stream=stream, report=False)
        for stream in (True, False)
    )
    assert streamed.stream is not None and streamed.memory_bytes > fetched.memory_bytes
    assert streamed.scratch_bytes - fetched.scratch_bytes == streamed.stream.peak_bytes


def test_refusals(hub: LocalHub, tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny_checkpoint()
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="is here already; --stream is for models on the Hub"):
        convert(str(checkpoint), out, stream=True)
    with pytest.raises(ConvertError, match="of which --stream keeps nothing"):
        convert(MODEL, out, stream=True, evaluate=checkpoint / "config.json")
    publish(hub, tiny_checkpoint("pickled", pickled=True))
    with pytest.raises(UnsupportedModelError, match=r"as pickles.*convert it without --stream"):
        convert(MODEL, out, stream=True)
    publish(hub, checkpoint)
    plan = plan_conversion(MODEL, out, overrides=RECIPES["uncalibrated"], stream=True)
    assert any("model.safetensors is all there is of the weights" in text for text in plan.warnings)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="which HF_HUB_OFFLINE forbids"):
        convert(MODEL, out, stream=True)


def test_a_truncated_shard_is_found_before_any_work(hub: LocalHub, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", CheckpointShape(layers=2, shards=3))
    shard = path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    publish(hub, path)
    plan = plan_conversion(MODEL, tmp_path / "out", overrides=RECIPES["uncalibrated"], stream=True)
    assert any("model-00002-of-00003.safetensors: truncated" in text for text in plan.errors)
