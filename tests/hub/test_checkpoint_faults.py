"""A checkpoint on the Hub, for the converter: faults that pass are waited for, damage is fetched again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fut_convert.errors import CheckpointError, HubError
from fut_convert.sources.hub import open_hub_model
from local_hub import Fault, LocalHub

GET_SHARD = "GET .*/model-00001"


@pytest.fixture(autouse=True)
def checkpoint(hub: LocalHub, tiny_checkpoint: Callable[..., Path]) -> dict[str, bytes]:
    path = tiny_checkpoint("model", layers=1, shards=2)
    files = {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}
    hub.publish("some/model", files)
    return files


def check_whole(files: dict[str, bytes]) -> None:
    with open_hub_model("some/model") as source:
        assert source.check() == []
        for name, content in files.items():
            assert (source.location / name).read_bytes() == content


@pytest.mark.parametrize(
    "fault",
    [
        Fault(GET_SHARD, cut=1000, times=2),
        Fault(GET_SHARD, 503),
        Fault(GET_SHARD, 429, {"Retry-After": "3"}),
        Fault("HEAD .*/config.json", 502),
        Fault("GET /api/models", 429, {"Retry-After": "3"}, times=2),
        Fault(GET_SHARD, corrupt=True),
        Fault("GET .*/config.json", corrupt=True),
        Fault("GET .*/model.safetensors.index", corrupt=True),
        Fault("GET .*/tokenizer.json", corrupt=True),
    ],
    ids=lambda f: f"{f.request[-12:]}-{f.status or ('corrupt' if f.corrupt else 'cut')}",
)
def test_passing_faults_do_no_harm(
    hub: LocalHub, checkpoint: dict[str, bytes], waits: list[float], fault: Fault
) -> None:
    hub.faults = [replace(fault)]
    check_whole(checkpoint)
    assert hub.faults[0].times == 0 and (not fault.headers or max(waits) >= 3)


def test_what_comes_damaged_twice_is_named(hub: LocalHub) -> None:
    hub.faults = [Fault(GET_SHARD, corrupt=True, times=2)]
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors does not have the hash"):
        open_hub_model("some/model")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("HEAD", 429, {"Retry-After": "900"}, times=9), r"HTTP 429.*again in 900 s"),
        (Fault("HEAD", 500, times=99), "answered HTTP 500; try again later"),
        (Fault("HEAD", 403, error="no"), r"access denied \(HTTP 403\) \(no\)"),
        (Fault(GET_SHARD, cut=0, times=99), "was cut again and again"),
    ],
)
def test_failures_read_well(hub: LocalHub, waits: list[float], fault: Fault, message: str) -> None:
    hub.faults = [replace(fault)]
    with pytest.raises(HubError, match=message):
        open_hub_model("some/model")


@pytest.mark.parametrize(
    "answer",
    [b"[1]", b"{", b"\xff", b"[" * 100_000, b'{"id": "some/model"}', b'{"id": "x", "siblings": 3}',
     b'{"id": "x", "siblings": [{}]}', b'{"id": "x", "siblings": [{"rfilename": {}}]}',
     b'{"id": "x", "siblings": [{"rfilename": "model.safetensors", "size": "x"}]}'],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_answer_that_is_none(hub: LocalHub, answer: bytes, stream: bool) -> None:
    hub.infos["some/model"] = answer
    with pytest.raises((CheckpointError, HubError), match=r"cannot be understood|no weights"):
        open_hub_model("some/model", stream=stream)


@pytest.mark.parametrize("name", ["../../outside.safetensors", "/etc/passwd", "a\\b", "a\0b"])
def test_names_that_lead_out_are_never_fetched(hub: LocalHub, checkpoint: dict[str, bytes], name: str) -> None:
    index = json.loads(checkpoint["model.safetensors.index.json"])
    index["weight_map"]["lm_head.weight"] = name
    hub.publish("some/model", checkpoint | {"model.safetensors.index.json": json.dumps(index).encode()})
    names = [*checkpoint, name]
    info = {"_id": "1", "id": "some/model", "siblings": [{"rfilename": n, "size": 1, "blobId": "0"} for n in names]}
    hub.infos["some/model"] = json.dumps(info).encode()
    for stream in (False, True):
        with pytest.raises(CheckpointError, match=r"index\.json names .*, which the repository does not have"):
            open_hub_model("some/model", stream=stream)
    assert not hub.count(r"outside|passwd|a.b")


def test_index_of_another_type(hub: LocalHub, checkpoint: dict[str, bytes]) -> None:
    hub.publish("some/model", checkpoint | {"model.safetensors.index.json": b'{"weight_map": "abc"}'})
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map is not an object of file names"):
        open_hub_model("some/model")


@pytest.mark.parametrize("status", [401, 403])
def test_gated(hub: LocalHub, status: int, monkeypatch: pytest.MonkeyPatch, checkpoint: dict[str, bytes]) -> None:
    hub.gated["some/model"] = status
    with pytest.raises(HubError, match=r"access is gated; accept its licence at .*/some/model, then log in"):
        open_hub_model("some/model")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(HubError, match="does not accept the token of HF_TOKEN"):
        open_hub_model("some/model")
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    check_whole(checkpoint)
