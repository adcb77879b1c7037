"""Publishing: what goes to the Hub and what never does, in one commit, resumed after faults, refused with a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from huggingface_hub import constants

from fut_runtime.artifact.cli import main
from fut_runtime.artifact.reader import Artifact
from fut_runtime.errors import ArtifactError, HubError
from fut_runtime.hub.card import model_card
from fut_runtime.hub.contents import upload_contents
from fut_runtime.hub.upload import check_upload, upload_artifact
from local_hub import Fault, LocalHub
from tiny_artifact import make_manifest, write_artifact

#: Makes two of them.
SHARD_BYTES = 130_000
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """Two shards, a side file, a report, and things that are nobody's business."""
    source = {"kind": "hub", "id": "some/base", "revision": "main", "commit": "0" * 40}
    side_files = {"tokenizer.json": b"{}", "SOURCE_README.md": b"---\nlicense: mit\n---\n"}
    path = write_artifact(
        tmp_path / "art", replace(make_manifest(), source=source), side_files=side_files, max_shard_bytes=SHARD_BYTES
    )
    (path / "report").mkdir()
    for name in ("report.md", "report/modules.png", "conversion_log.json", ".env", ".fut_lock", "notes.txt"):
        (path / name).write_text(f"content of {name}")
    return path


PUBLIC = {
    *SHARDS, "fut_config.json", "fut_files.json", "fut_sealed.json", "model.safetensors.index.json", "tokenizer.json",
    "SOURCE_README.md", "README.md", "report.md", "report/modules.png",
}  # fmt: skip


def test_what_goes_and_what_stays(artifact: Path) -> None:
    contents = upload_contents(Artifact.open(artifact), "me/model")
    assert {file.name for file in contents.files} == PUBLIC
    assert contents.staying == (".env", ".fut_lock", "conversion_log.json", "notes.txt")


@pytest.mark.parametrize("multipart", [False, True])
def test_an_artifact_is_published_in_one_commit(hub: LocalHub, login: None, artifact: Path, multipart: bool) -> None:
    hub.multipart = multipart
    done = upload_artifact(artifact, "me/model", private=True, message="a first version")
    files = hub.files("me/model")
    assert set(files) == {*PUBLIC, ".gitattributes"}
    for name in PUBLIC - {"README.md"}:
        assert files[name] == (artifact / name).read_bytes()
    assert files["README.md"].decode() == model_card(Artifact.open(artifact), "me/model").text
    commits = hub.repos["me/model"].branches["main"]
    assert [message for _, message, _ in commits] == ["initial commit", "a first version"]
    assert (done.commit, done.changed, done.revision, done.notes) == (commits[-1][0], True, "main", ())
    assert done.url == f"{constants.ENDPOINT}/me/model" and hub.repos["me/model"].private


def test_uploading_again_sends_nothing(hub: LocalHub, login: None, artifact: Path) -> None:
    first = upload_artifact(artifact, "me/model")
    sent = hub.count("^PUT")
    again = upload_artifact(artifact, "me/model")
    assert (again.commit, again.changed) == (first.commit, False)
    assert hub.count("^PUT") == sent and hub.count("/commit/") == 1


def test_another_branch(hub: LocalHub, login: None, artifact: Path) -> None:
    upload_artifact(artifact, "team/model", revision="v2")
    branches = hub.repos["team/model"].branches
    assert len(branches["main"]) == 1 and set(branches["v2"][-1][2]) == {*PUBLIC, ".gitattributes"}
    upload_artifact(artifact, "team/model", revision="v2")
    assert len(branches["v2"]) == 2


def test_shards_of_an_earlier_artifact_go(hub: LocalHub, login: None, artifact: Path, tmp_path: Path) -> None:
    upload_artifact(artifact, "me/model")
    whole = write_artifact(tmp_path / "whole")
    upload_artifact(whole, "me/model", card=False)
    files = hub.files("me/model")
    assert [name for name in files if name.endswith(".safetensors")] == ["model-00001-of-00001.safetensors"]
    assert b"some/base" in files["README.md"]  # left alone without a card


def test_a_repository_with_another_model_is_left_alone(hub: LocalHub, login: None, artifact: Path) -> None:
    before = {"config.json": b"{}", SHARDS[0]: b"theirs"}
    hub.publish("me/model", before)
    with pytest.raises(ArtifactError, match=r"branch main holds another model \(model-00001-of-00002\.safetensors\)"):
        upload_artifact(artifact, "me/model")
    assert hub.files("me/model") == before and not hub.count("^PUT")


def test_a_readme_beside_the_sealed_files_is_the_card(hub: LocalHub, login: None, artifact: Path) -> None:
    (artifact / "README.md").write_text("---\nlicense: mit\n---\nMine.\n")
    upload_artifact(artifact, "me/model")
    assert hub.files("me/model")["README.md"] == (artifact / "README.md").read_bytes()


def test_a_sealed_readme_stays_what_it_is(hub: LocalHub, login: None, tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "old", side_files={"README.md": b"theirs"})
    done = upload_artifact(path, "me/model")
    assert hub.files("me/model")["README.md"] == b"theirs" and "repack" in done.notes[0]


def test_measurements_given_by_name_go_along(hub: LocalHub, login: None, artifact: Path, tmp_path: Path) -> None:
    bench = tmp_path / "results.jsonl"
    bench.write_text(json.dumps({"bench": "prefill"}) + "\n")
    upload_artifact(artifact, "me/model", bench=bench)
    assert hub.files("me/model")["bench.jsonl"] == bench.read_bytes()


@pytest.mark.parametrize("name", ["server.pem", "id_rsa", "credentials.json", "additional/.netrc", "hf_token"])
def test_sealed_secrets_are_refused_by_name(tmp_path: Path, name: str) -> None:
    artifact = Artifact.open(write_artifact(tmp_path / "art", side_files={name: b"x"}))
    with pytest.raises(ArtifactError, match="has the name of a hidden file or of a secret"):
        upload_contents(artifact, "me/model")


@pytest.mark.parametrize("secret", ["hf_" + "aB3" * 12, "-----BEGIN OPENSSH PRIVATE KEY-----"])
@pytest.mark.parametrize("name", ["README.md", "report.md"])
def test_secrets_inside_files_are_refused(artifact: Path, name: str, secret: str) -> None:
    (artifact / name).write_text(f"export TOKEN={secret}\n")
    with pytest.raises(ArtifactError, match=rf"{name}: holds an access token or a private key") as caught:
        upload_contents(Artifact.open(artifact), "me/model")
    assert secret not in str(caught.value)


def test_links_out_of_the_directory_are_not_followed(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("private")
    (artifact / "report.md").unlink()
    (artifact / "report.md").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match="links out are not followed"):
        upload_contents(Artifact.open(artifact), "me/model")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_artifact_is_never_published(hub: LocalHub, login: None, artifact: Path) -> None:
    flip(artifact / SHARDS[1])
    with pytest.raises(ArtifactError, match=r"chunk 0 .*not uploaded"):
        upload_artifact(artifact, "me/model")
    assert "me/model" not in hub.repos
    with pytest.raises(ArtifactError, match=r"is damaged and nothing was published"):
        upload_artifact(artifact, "me/model", verify=False)
    assert set(hub.files("me/model")) == {".gitattributes"}


def test_an_unsealed_artifact_is_refused(hub: LocalHub, login: None, artifact: Path) -> None:
    (artifact / "fut_sealed.json").unlink()
    with pytest.raises(ArtifactError, match="is not sealed"):
        upload_artifact(artifact, "me/model")
    assert hub.asked == []


FAULTS = {
    "busy": Fault("POST /api/repos/create", 429, {"Retry-After": "7"}),
    "limited_commit": Fault("POST /api/models/.*/commit", 429, {"Retry-After": "7"}),
    "limited_whoami": Fault("GET /api/whoami", 429, {"Retry-After": "7"}),
    "unavailable": Fault("POST /api/models/.*/commit", 503),
    "storage": Fault("PUT /storage", 500),
    "lost_answer": Fault("POST /api/models/.*/preupload", cut=10),
    "cut_file": Fault("PUT /storage", cut=1000, times=2),
}


@pytest.mark.parametrize("name", FAULTS)
def test_passing_faults_are_waited_for(
    hub: LocalHub, login: None, artifact: Path, waits: list[float], name: str
) -> None:
    hub.faults = [replace(FAULTS[name])]
    upload_artifact(artifact, "me/model")
    assert set(hub.files("me/model")) == {*PUBLIC, ".gitattributes"}
    assert waits and (not FAULTS[name].headers or waits[0] in (7, 8))
    assert hub.faults[0].times == 0 and len(hub.repos["me/model"].branches["main"]) == 2


def test_an_upload_goes_on_where_it_stopped(
    hub: LocalHub, login: None, artifact: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fut_runtime.hub.upload._THREADS", 1)
    hub.faults = [Fault("PUT /storage", 503, skip=1, times=1000)]
    with pytest.raises(HubError, match="answered HTTP 503; try again later; what has arrived there is kept"):
        upload_artifact(artifact, "me/model")
    assert set(hub.files("me/model")) == {".gitattributes"} and len(hub.large_files) == 1
    hub.faults = []
    sent = hub.count("^PUT")
    upload_artifact(artifact, "me/model")
    assert hub.count("^PUT") - sent == 2  # the other shard and the plot
    assert set(hub.files("me/model")) == {*PUBLIC, ".gitattributes"}


def test_waiting_for_minutes_is_left_to_the_user(
    hub: LocalHub, login: None, artifact: Path, waits: list[float]
) -> None:
    hub.faults = [Fault("POST /api/repos/create", 429, {"Retry-After": "3600"}, times=9)]
    with pytest.raises(HubError, match=r"limits the number of requests \(HTTP 429\).*again in 3600 s"):
        upload_artifact(artifact, "me/model")
    assert waits == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("POST /api/repos/create", 403, error="No rights here"), r"may not write.*HTTP 403.*No rights here"),
        (Fault("POST .*/commit/", 403, error="storage limit reached"), r"HTTP 403.*storage limit reached"),
        (Fault("POST .*/commit/", 412), "was changed by someone else meanwhile"),
        (Fault("POST .*/preupload/", 401, error="Invalid credentials in Authorization header"), "not accept the token"),
        (Fault("POST .*/objects/batch", 404), "no model at .* that this token may write to|HTTP 404"),
        (Fault("PUT /storage", 400, error="the content has another hash", times=9), "the content has another hash"),
    ],
)
def test_refusals_read_well(hub: LocalHub, login: None, artifact: Path, fault: Fault, message: str) -> None:
    hub.faults = [replace(fault)]
    with pytest.raises(HubError, match=message) as caught:
        upload_artifact(artifact, "me/model")
    assert "hf_writer" not in str(caught.value) and "storage/" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hub_that_drops_files_is_found_out(hub: LocalHub, login: None, artifact: Path) -> None:
    hub.ignored = frozenset({"tokenizer.json"})
    with pytest.raises(HubError, match=r"tokenizer\.json is missing there.*\.gitignore"):
        upload_artifact(artifact, "me/model")


def test_metadata_that_the_hub_does_not_take(hub: LocalHub, login: None, artifact: Path) -> None:
    with pytest.raises(HubError, match="Invalid metadata in README"):
        upload_artifact(artifact, "me/model", license="nonsense")


@pytest.mark.parametrize(
    ("token", "repo", "message"),
    [
        (None, "me/model", r"needs an access token.*settings/tokens.*hf auth login"),
        ("hf_wrong", "me/model", r"does not accept the token of HF_TOKEN \(HTTP 401\)"),
        ("hf_reader", "me/model", "the token may only read"),
        ("hf_writer", "you/model", "may not publish under 'you'; it may under me, team"),
        ("hf_writer", "model", "no valid Hub id"),
    ],
)
def test_who_may_not_publish_is_told_before_any_work(
    hub: LocalHub, artifact: Path, monkeypatch: pytest.MonkeyPatch, token: str | None, repo: str, message: str
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    for check in (lambda: check_upload(repo), lambda: upload_artifact(artifact, repo)):
        with pytest.raises(HubError, match=message) as caught:
            check()
        assert "hf_wrong" not in str(caught.value)
    assert hub.repos == {}


def test_private_never_means_public(hub: LocalHub, login: None, artifact: Path) -> None:
    hub.publish("me/model", {})
    with pytest.raises(HubError, match="exists and is public"):
        check_upload("me/model", private=True)
    with pytest.raises(HubError, match="exists and is public"):
        upload_artifact(artifact, "me/model", private=True)
    assert hub.files("me/model") == {}


def test_without_a_network(
    hub: LocalHub, login: None, artifact: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        upload_artifact(artifact, "me/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        upload_artifact(artifact, "me/model")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_a_dry_run_lists_what_would_go_where_and_asks_nobody(hub: LocalHub, artifact: Path) -> None:
    result = run("upload", artifact, "me/model", "--dry-run", "--revision", "v2")
    assert result.exit_code == 0 and hub.asked == []
    assert f"to {constants.ENDPOINT}/me/model, branch v2:" in result.stdout
    for name in PUBLIC:
        assert f"  {name}\n" in result.stdout
    assert "stays here: .env, .fut_lock, conversion_log.json, notes.txt" in result.stdout
    data = json.loads(run("upload", artifact, "me/model", "--dry-run", "--json", "--no-card").stdout)
    assert {file["name"] for file in data["files"]} == PUBLIC - {"README.md"}
    assert data["bytes"] == sum(file["bytes"] for file in data["files"]) and data["revision"] == "main"


def test_the_command_publishes(hub: LocalHub, login: None, artifact: Path) -> None:
    result = run("upload", artifact, "me/model", "--private", "--message", "mine", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    commit, message, _ = hub.repos["me/model"].branches["main"][-1]
    assert (data["commit"], message, data["changed"]) == (commit, "mine", True)
    again = run("upload", artifact, "me/model", "--no-verify")
    assert again.stdout.startswith(f"unchanged: {constants.ENDPOINT}/me/model, branch main, commit {commit[:12]}")


def test_the_command_refuses_with_a_message(hub: LocalHub, artifact: Path, tmp_path: Path) -> None:
    result = run("upload", artifact, "me/model")
    assert result.exit_code == 1 and "needs an access token" in result.stderr and "Traceback" not in result.output
    assert run("upload", tmp_path / "none", "me/model").exit_code == 2


def test_an_interrupt_says_what_is_kept(
    hub: LocalHub, login: None, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fut_runtime.hub.upload.HfApi.create_commit", interrupt)
    result = run("upload", artifact, "me/model")
    assert result.exit_code == 130 and "nothing is published yet, and the same command goes on" in result.stderr
