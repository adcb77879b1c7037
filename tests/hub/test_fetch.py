"""Fetching an artifact: what belongs to it, hashed before the seal arrives, resumed, and failures that read well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import huggingface_hub.file_download
import pytest
from click.testing import CliRunner, Result
from huggingface_hub import constants

from fut_runtime.artifact.cli import main
from fut_runtime.artifact.verify import verify_artifact
from fut_runtime.errors import ArtifactError, HubError
from fut_runtime.hub.download import fetch_artifact
from fut_runtime.resolve import resolve_artifact
from local_hub import Fault, LocalHub
from repository import REPOSITORY
from tiny_artifact import write_artifact

SHARD = "model-00001-of-00001.safetensors"
GET_SHARD = f"GET /me/model/resolve/.*/{SHARD}"


@pytest.fixture
def files(hub: LocalHub, tmp_path: Path) -> dict[str, bytes]:
    """An artifact on the Hub, with a card, a report and a file that is nobody's business."""
    path = write_artifact(tmp_path / "art", side_files={"tokenizer.json": b"{}"})
    files = {p.name: p.read_bytes() for p in path.iterdir()}
    hub.publish("me/model", {**files, "README.md": b"card", "report.md": b"report", "pytorch_model.bin": b"large"})
    return files


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_what_belongs_to_it_is_fetched_once_and_pinned(hub: LocalHub, files: dict[str, bytes]) -> None:
    commit = hub.repos["me/model"].branches["main"][-1][0]
    path = resolve_artifact("me/model")
    assert path.name == commit and verify_artifact(path).ok
    assert {p.name for p in path.iterdir()} == {*files, "README.md", "report.md"}
    before = hub.count("^GET .*/resolve/")
    assert resolve_artifact("me/model", "main") == path == resolve_artifact("me/model", commit)
    assert hub.count("^GET .*/resolve/") == before
    gets = [line for line in hub.asked if line.startswith("GET /me/model/resolve/")]
    assert gets[0].endswith("/fut_files.json") and gets[-1].endswith("/fut_sealed.json")


def test_another_revision_is_another_snapshot(hub: LocalHub, files: dict[str, bytes], tmp_path: Path) -> None:
    other = write_artifact(tmp_path / "other", side_files={"LICENSE": b"x"})
    hub.publish("me/model", {p.name: p.read_bytes() for p in other.iterdir()}, branch="v2")
    assert not (resolve_artifact("me/model") / "LICENSE").exists()
    assert (resolve_artifact("me/model", "v2") / "LICENSE").is_file()


def test_every_command_of_fut_artifact_takes_an_id(hub: LocalHub, files: dict[str, bytes], tmp_path: Path) -> None:
    assert "LlamaForCausalLM" in run("inspect", "me/model").stdout
    verified = run("verify", "me/model", "--revision", "main", "--json")
    assert verified.exit_code == 0 and json.loads(verified.stdout)["ok"]
    assert run("export", "me/model", tmp_path / "export").exit_code == 0
    assert run("repack", "me/model", tmp_path / "repacked", "--nibble-order", "linear/1").exit_code == 0
    assert "$ fut-run chat me/model" in run("card", "me/model").stdout
    refused = run("card", "me/model", "--write")
    assert refused.exit_code == 1 and "Hub's cache" in refused.stderr
    missing = run("inspect", "me/other")
    assert missing.exit_code == 1 and "neither a local path nor a model at" in missing.stderr
    local = run("inspect", tmp_path / "art", "--revision", "v1")
    assert local.exit_code == 1 and "has no revision 'v1'" in local.stderr


@pytest.mark.parametrize(
    "fault",
    [
        Fault(GET_SHARD, cut=1000),
        Fault(GET_SHARD, cut=1000, times=3),
        Fault(GET_SHARD, 429, {"Retry-After": "3"}),
        Fault(GET_SHARD, 503),
        Fault("HEAD .*/fut_files", 503),
        Fault("HEAD .*/fut_files", 429, {"Retry-After": "3"}, times=2),
        Fault("GET /api/models/", 502),
        Fault(GET_SHARD, corrupt=True),
        Fault("GET .*/fut_config", corrupt=True),
        Fault("GET .*/fut_files", corrupt=True),
        Fault("GET .*/fut_sealed", corrupt=True),
    ],
    ids=lambda f: f"{f.request.split('/')[-1][:12]}-{f.status or ('corrupt' if f.corrupt else f'cut{f.times}')}",
)
def test_passing_faults_do_no_harm(hub: LocalHub, files: dict[str, bytes], waits: list[float], fault: Fault) -> None:
    hub.faults = [replace(fault)]
    path = fetch_artifact("me/model")
    assert verify_artifact(path).ok and hub.faults[0].times == 0
    if fault.headers:
        assert waits and waits[0] >= 3
    if fault.cut:  # the rest is asked for, not the whole
        assert hub.count(GET_SHARD) == fault.times + 1


def test_a_repository_that_is_damaged_is_said_to_be(hub: LocalHub, files: dict[str, bytes]) -> None:
    hub.publish("me/model", {**files, SHARD: files[SHARD][:-1] + bytes([files[SHARD][-1] ^ 1])})
    with pytest.raises(ArtifactError, match=rf"{SHARD} came with SHA-256 \w+, sealed is .*fetched twice"):
        resolve_artifact("me/model")
    assert hub.count(GET_SHARD) == 2
    assert not list(Path(constants.HF_HUB_CACHE).rglob("fut_sealed.json"))


def test_an_interrupted_download_is_not_taken_for_whole_and_goes_on(
    hub: LocalHub, files: dict[str, bytes], waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults = [Fault(GET_SHARD, cut=70_000, times=1), Fault(GET_SHARD, 503, times=99)]
    with pytest.raises(HubError, match=r"HTTP 503; try again later|was cut again and again"):
        resolve_artifact("me/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"HF_HUB_OFFLINE is set and the download of commit .* did not finish"):
        resolve_artifact("me/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.faults = []
    path = resolve_artifact("me/model")
    assert verify_artifact(path).ok
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert resolve_artifact("me/model") == path and len(hub.asked) == asked


def test_what_is_no_artifact_is_refused_before_it_is_fetched(hub: LocalHub, files: dict[str, bytes]) -> None:
    hub.publish("me/checkpoint", {"config.json": b"{}", "model.safetensors": b"x" * 1000})
    with pytest.raises(ArtifactError, match=r"is not an artifact .*convert it first: fut-convert me/checkpoint OUT"):
        resolve_artifact("me/checkpoint")
    hub.publish("me/half", {name: data for name, data in files.items() if name not in (SHARD, "fut_sealed.json")})
    with pytest.raises(ArtifactError, match=r"incomplete: the repository does not have fut_sealed.json and 1 more"):
        resolve_artifact("me/half")
    assert hub.count("GET .*safetensors") == 0


def test_a_hostile_list_of_files_leads_nowhere(hub: LocalHub, files: dict[str, bytes]) -> None:
    listing = json.loads(files["fut_files.json"])
    listing["files"]["../../outside"] = listing["files"].pop("tokenizer.json")
    hub.publish("me/model", {**files, "fut_files.json": json.dumps(listing).encode()})
    with pytest.raises(ArtifactError, match="unsafe file name"):
        resolve_artifact("me/model")


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_model(hub: LocalHub, files: dict[str, bytes], status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated["me/model"] = status
    with pytest.raises(HubError, match="access is gated") as caught:
        resolve_artifact("me/model")
    message = str(caught.value)
    assert f"accept its licence at {constants.ENDPOINT}/me/model" in message
    assert "hf auth login" in message and "HF_TOKEN" in message
    assert ("have not granted it yet" in message) == (status == 403)
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    assert verify_artifact(resolve_artifact("me/model")).ok


def test_a_wrong_token(hub: LocalHub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(
        HubError, match=r"does not accept the token of HF_TOKEN \(HTTP 401\).*settings/tokens"
    ) as caught:
        resolve_artifact("me/model")
    assert "hf_wrong" not in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("HEAD", 403, error="no"), r"access denied \(HTTP 403\) \(no\); check that the token may read"),
        (Fault("HEAD", 404, {"X-Error-Code": "RevisionNotFound"}), "no revision 'v9'; see .*/me/model/tree"),
        (Fault("HEAD", 404, {"X-Error-Code": "RepoNotFound"}), "neither a local path nor a model at"),
        (Fault("HEAD", 429, {"Retry-After": "900"}, times=9), r"HTTP 429.*again in 900 s"),
        (Fault("HEAD", 500, times=99), "answered HTTP 500; try again later"),
        (Fault("GET", cut=5, times=999), "was cut again and again; run the same command, what has arrived is kept"),
    ],
)
def test_failures_read_well(
    hub: LocalHub, files: dict[str, bytes], waits: list[float], fault: Fault, message: str
) -> None:
    hub.faults = [fault]
    with pytest.raises(HubError, match=message) as caught:
        resolve_artifact("me/model", "v9" if "v9" in message else None)
    assert "\n" not in str(caught.value)


def test_no_network(hub: LocalHub, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    for module in (constants, huggingface_hub.file_download):
        address = "http://127.0.0.1:9/{repo_id}/{revision}/{filename}"
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", address, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"http://127\.0\.0\.1:9 cannot be reached; check the spelling, the network"):
        resolve_artifact("me/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set and revision main is not in the cache"):
        resolve_artifact("me/model")


def test_a_full_disk_is_named(hub: LocalHub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device", "/cache/blobs/x")

    monkeypatch.setattr("fut_runtime.hub.download.snapshot_download", fail)
    with pytest.raises(HubError, match=r"/cache/blobs/x: No space left on device; HF_HOME says where"):
        resolve_artifact("me/model")


def test_the_environment_is_honoured(hub: LocalHub, files: dict[str, bytes], tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_TOKEN and HF_HOME, which huggingface_hub reads when it is imported."""
    hub.gated["me/model"] = 401
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | {
        "HF_ENDPOINT": constants.ENDPOINT,
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": "hf_reader",
        "PYTHONPATH": str(REPOSITORY),
    }
    program = "import sys; from fut_runtime.resolve import resolve_artifact; print(resolve_artifact('me/model'))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert verify_artifact(Path(done.stdout.strip())).ok
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "home")
