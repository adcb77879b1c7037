"""`fut-convert --push-to-hub`: checked before the work, published after it, and whole whatever the Hub says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from huggingface_hub import constants

from fut_convert.cli import main
from fut_runtime.artifact.verify import verify_artifact
from fut_runtime.resolve import resolve_artifact
from local_hub import Fault, LocalHub

Make = Callable[..., Path]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in (*arguments, "--no-calibration", "--no-report")])


@pytest.fixture
def checkpoint(tiny_checkpoint: Make) -> Path:
    path = tiny_checkpoint("model", layers=1)
    (path / "README.md").write_text("---\nlicense: apache-2.0\n---\n# The source's\n")
    return path


def test_from_one_hub_id_to_another(hub: LocalHub, login: None, checkpoint: Path, tmp_path: Path) -> None:
    source = {p.relative_to(checkpoint).as_posix(): p.read_bytes() for p in checkpoint.rglob("*") if p.is_file()}
    commit = hub.publish("some/base", source)
    out = tmp_path / "out"
    result = run("some/base", out, "--push-to-hub", "me/packed", "--push-private", "--push-message", "mine", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["hub"]["repo"] == "me/packed" and data["hub"]["changed"]
    assert hub.repos["me/packed"].branches["main"][-1][:2] == (data["hub"]["commit"], "mine")
    card = hub.files("me/packed")["README.md"].decode()
    assert card.startswith("---\nlicense: apache-2.0\nbase_model: some/base\n")
    assert commit[:12] in card and "$ fut-run chat me/packed" in card
    assert b"The source's" in hub.files("me/packed")["SOURCE_README.md"]
    assert verify_artifact(resolve_artifact("me/packed")).ok


def test_where_it_went_is_printed(hub: LocalHub, login: None, checkpoint: Path, tmp_path: Path) -> None:
    result = run(checkpoint, tmp_path / "out", "--push-to-hub", "me/packed", "--push-revision", "v2")
    assert result.exit_code == 0, result.output
    assert f"published: {constants.ENDPOINT}/me/packed, branch v2, commit" in result.stdout
    assert "--base-model" in result.stderr and "fut_sealed.json" in hub.files("me/packed", "v2")


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
def test_what_the_hub_would_refuse_is_refused_before_the_work(
    hub: LocalHub, login: None, checkpoint: Path, tmp_path: Path, dry_run: tuple[str, ...]
) -> None:
    hub.publish("me/model", {"config.json": b"{}", "model.safetensors": b"x"})
    hub.publish("me/public", {})
    out = tmp_path / "out"
    for options, message in (
        (("--push-to-hub", "you/model"), "may not publish under 'you'"),
        (("--push-to-hub", "me/model"), "holds another model"),
        (("--push-to-hub", "me/model", "--push-revision", "new"), "holds another model"),
        (("--push-to-hub", "me/public", "--push-private"), "exists and is public"),
    ):
        result = run(checkpoint, out, *options, *dry_run)
        assert result.exit_code == 1 and message in result.stderr, result.output
    assert not out.exists() and hub.count("^POST") == 0


def test_a_failed_upload_leaves_a_whole_artifact_and_says_how_to_go_on(
    hub: LocalHub, login: None, checkpoint: Path, tmp_path: Path
) -> None:
    hub.faults = [Fault("POST /api/models/.*/commit", 403, error="no space left for you")]
    out = tmp_path / "out"
    result = run(checkpoint, out, "--push-to-hub", "me/packed", "--push-private", "--push-message", "a b")
    assert result.exit_code == 1 and "Traceback" not in result.output
    assert "out is whole, but not published" in result.stderr and "no space left for you" in result.stderr
    assert f"fut-artifact upload {out} me/packed --private --message 'a b' tries again" in result.stderr
    assert verify_artifact(out).ok


def test_an_interrupted_upload_says_the_same(
    hub: LocalHub, login: None, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fut_runtime.hub.upload.HfApi.preupload_lfs_files", interrupt)
    result = run(checkpoint, tmp_path / "out", "--push-to-hub", "me/packed")
    assert result.exit_code == 130
    assert "interrupted; out is whole, but not published" in result.stderr and "goes on" in result.stderr


def test_how_to_publish_without_publishing_is_a_mistake(checkpoint: Path, tmp_path: Path) -> None:
    result = run(checkpoint, tmp_path / "out", "--push-private")
    assert result.exit_code == 2 and "--push-private says how to publish" in result.stderr
