"""Models on the Hub: what is fetched, what is pinned, what the cache serves offline, and how failures read."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hub_server import COMMIT, HubModel, serve
from huggingface_hub import constants

from fut_convert.errors import CheckpointError, ConvertError, HubError, UnsupportedModelError
from fut_convert.sources.directory import DirectorySource
from fut_convert.sources.hub import open_hub_model
from quantized_checkpoints import gptq_config, gptq_parts, matrices_of, write_quantized
from synthetic_checkpoint import CheckpointShape, make_tensors, write_checkpoint

SHAPE = CheckpointShape(layers=1, shards=2)
NOT_NEEDED = ("pytorch_model.bin", "consolidated.safetensors", "model.onnx", "modeling_x.py", "original/params.json")

Open = Callable[..., DirectorySource]


@pytest.fixture
def hub(tmp_path: Path) -> HubModel:
    directory = write_checkpoint(tmp_path / "published", SHAPE)
    (directory / "LICENSE").write_text("do what you like\n")
    (directory / "original").mkdir()
    for name in NOT_NEEDED:
        (directory / name).write_text("x")
    return HubModel(directory)


@pytest.fixture
def address(hub: HubModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serve(hub) as url:
        yield url


@pytest.fixture
def open_model(hub: HubModel, address: str, tmp_path: Path) -> Open:
    def open_it(model: str = hub.name, revision: str | None = None, token: str | None = None) -> DirectorySource:
        return open_hub_model(model, revision, token, endpoint=address, cache_dir=tmp_path / "cache")

    return open_it


@pytest.mark.parametrize("revision", [None, "v1.0", COMMIT])
def test_only_what_is_needed_is_fetched_and_the_commit_pinned(
    hub: HubModel, open_model: Open, revision: str | None
) -> None:
    with open_model(revision=revision) as source:
        assert source.identity == {
            "kind": "hub",
            "id": hub.name,
            "revision": revision or "main",
            "commit": COMMIT,
        }
        assert source.check() == []
        for name, tensor in make_tensors(SHAPE).items():
            assert torch.equal(source.load(name), tensor)
        assert "LICENSE" in dict(source.side_files())
    assert set(hub.fetched) == set(hub.files()) - set(NOT_NEEDED)
    assert len(hub.fetched) == len(set(hub.fetched))


def test_nothing_is_fetched_twice(hub: HubModel, open_model: Open) -> None:
    open_model().close()
    before = len(hub.fetched)
    open_model().close()
    assert len(hub.fetched) == before


def test_pickles_are_fetched_when_there_is_nothing_else(hub: HubModel, open_model: Open) -> None:
    for path in hub.directory.glob("*.safetensors*"):
        path.unlink()
    write_checkpoint(hub.directory, CheckpointShape(layers=1, pickled=True))
    with open_model() as source:
        assert {info.file for info in source.tensors.values()} == {"pytorch_model.bin"}


def test_quantized_model_is_fetched_with_its_config(hub: HubModel, open_model: Open) -> None:
    shutil.rmtree(hub.directory)
    config = gptq_config(64)
    matrices = write_quantized(
        hub.directory, matrices_of(64), gptq_parts, None, files={"quantize_config.json": config}, layers=1
    )
    with open_model() as source:
        assert [p.message for p in source.check()] == []
        for name, matrix in matrices.items():
            assert torch.equal(source.load(name), matrix.weight())


@pytest.mark.parametrize("place", ["config.json", "quantize_config.json"])
def test_a_quantized_format_that_cannot_be_read_is_refused_before_its_weights_are_fetched(
    place: str, hub: HubModel, open_model: Open
) -> None:
    section = gptq_config(64, is_marlin_format=True)
    if place == "config.json":
        section = {**json.loads((hub.directory / place).read_text()), "quantization_config": section}
    (hub.directory / place).write_text(json.dumps(section))
    with pytest.raises(UnsupportedModelError, match=rf"{place}.*Marlin"):
        open_model()
    assert not any(name.endswith(".safetensors") for name in hub.fetched)


def test_unsupported_model_is_refused_before_its_weights_are_fetched(hub: HubModel, open_model: Open) -> None:
    (hub.directory / "config.json").write_text('{"architectures": ["BertModel"]}')
    with pytest.raises(UnsupportedModelError, match=r"some-one/some-model: config\.json: architecture BertModel"):
        open_model()
    assert hub.fetched == ["config.json"]


def test_offline_serves_the_cache(hub: HubModel, open_model: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    open_model().close()
    before = len(hub.fetched)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for revision in (None, "main", COMMIT):
        with open_model(revision=revision) as source:
            assert source.identity["commit"] == COMMIT
            assert source.check() == []
    assert len(hub.fetched) == before
    with pytest.raises(HubError, match=r"HF_HUB_OFFLINE is set and revision v1\.0 is not in the cache"):
        open_model(revision="v1.0")


def test_offline_with_a_file_missing_from_the_cache(
    hub: HubModel, open_model: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_model().close()
    next((tmp_path / "cache").rglob("snapshots/*/model-00002-of-00002.safetensors")).unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing; the download"):
        open_model()


@pytest.mark.parametrize("status", [401, 403])
def test_gated_model_says_what_to_do(hub: HubModel, open_model: Open, address: str, status: int) -> None:
    hub.gated = status
    with pytest.raises(HubError, match="access is gated") as caught:
        open_model()
    assert f"{address}/{hub.name}" in str(caught.value)
    assert "HF_TOKEN" in str(caught.value) and "hf auth login" in str(caught.value)
    with open_model(token=hub.token) as source:
        assert source.check() == []


@pytest.mark.parametrize(
    ("model", "revision", "reason"),
    [
        ("some-one/other", None, "neither a local path nor a model at"),
        ("some-one/some-model", "v9", "no revision 'v9'"),
        ("--bad--id", None, "nor a valid Hub id"),
    ],
)
def test_unknown_model_or_revision(open_model: Open, model: str, revision: str | None, reason: str) -> None:
    with pytest.raises(HubError, match=reason):
        open_model(model, revision=revision)


def test_hub_that_fails(hub: HubModel, open_model: Open) -> None:
    hub.failing = 418
    with pytest.raises(HubError, match="HTTP 418"):
        open_model()


def test_no_network(hub: HubModel, open_model: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's attempts
    nowhere = "http://127.0.0.1:9"
    with pytest.raises(HubError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        open_hub_model(hub.name, endpoint=nowhere, cache_dir=tmp_path / "cache")
    open_model().close()
    with pytest.raises(HubError, match="set HF_HUB_OFFLINE=1 to use a copy that is in the cache"):
        open_hub_model(hub.name, endpoint=nowhere, cache_dir=tmp_path / "cache")


def _gguf_only(directory: Path) -> None:
    (directory / "config.json").unlink()
    (directory / "model-Q4_0.gguf").touch()


def _adapter_only(directory: Path) -> None:
    (directory / "config.json").unlink()
    (directory / "adapter_config.json").touch()


def _nothing(directory: Path) -> None:
    (directory / "config.json").unlink()


def _no_weights(directory: Path) -> None:
    for path in (*directory.glob("*.safetensors*"), *directory.glob("*.bin")):
        path.unlink()


def _shard_never_uploaded(directory: Path) -> None:
    (directory / "model-00002-of-00002.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "error", "reason"),
    [
        (_gguf_only, UnsupportedModelError, "GGUF files"),
        (_adapter_only, UnsupportedModelError, "LoRA adapter"),
        (_nothing, CheckpointError, "no config.json"),
        (_no_weights, CheckpointError, "no weights"),
        (_shard_never_uploaded, CheckpointError, "which the repository does not have"),
    ],
)
def test_repository_without_a_model(
    hub: HubModel, open_model: Open, damage: Callable[[Path], None], error: type[ConvertError], reason: str
) -> None:
    damage(hub.directory)
    with pytest.raises(error, match=re.escape(reason)):
        open_model()


def test_environment_is_honoured(hub: HubModel, address: str, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE, which huggingface_hub reads when it is imported."""
    hub.gated = 401
    program = (
        "import json, sys\n"
        "from fut_convert.sources import open_source\n"
        "with open_source(sys.argv[1]) as source:\n"
        "    print(json.dumps([source.identity, [str(p) for p in source.check()]]))\n"
    )
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
        "HF_ENDPOINT": address,
        "HF_HOME": str(tmp_path / "home"),
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    for extra in ({"HF_TOKEN": hub.token}, {"HF_HUB_OFFLINE": "1"}):
        done = subprocess.run(
            [sys.executable, "-c", program, hub.name],
            env={**environment, **extra},
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout) == [
            {"kind": "hub", "id": hub.name, "revision": "main", "commit": COMMIT},
            [],
        ]
