"""Access tokens and passwords stay out of everything that is printed, logged, raised or written."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from huggingface_hub import constants

import fut_convert.cli
import fut_runtime.artifact.cli
import fut_runtime.cli
from fut_convert.sources import open_source
from fut_runtime.errors import FutError, HubError
from fut_runtime.hub.failures import Repository
from fut_runtime.hub.secrets import redacted
from fut_runtime.resolve import resolve_artifact
from hub_client import client_settings
from local_hub import Fault, LocalHub
from tiny_artifact import write_artifact

SECRET = "hf_" + "Zx9" * 11
FOREIGN = "api_org_" + "Qw7" * 9


@pytest.fixture(params=[SECRET, FOREIGN])
def token(request: pytest.FixtureRequest, hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> str:
    secret: str = request.param
    hub.tokens[secret] = "write"
    monkeypatch.setenv("HF_TOKEN", secret)
    return secret


def spoken(command: click.Command, *arguments: str | Path) -> tuple[int, str]:
    """Exit code of a command, all that it says, and the traceback of what ended it."""
    result = CliRunner().invoke(command, [str(a) for a in arguments])
    chain = traceback.format_exception(result.exception) if result.exception is not None else []
    return result.exit_code, result.output + result.stderr + "".join(chain)


COMMANDS: dict[str, tuple[click.Command, tuple[str, ...]]] = {
    "convert": (fut_convert.cli.main, ("me/model", "OUT", "--no-calibration")),
    "convert --json": (fut_convert.cli.main, ("me/model", "OUT", "--no-calibration", "--json")),
    "convert --stream": (fut_convert.cli.main, ("me/model", "OUT", "--no-calibration", "--stream")),
    "convert --push-to-hub": (fut_convert.cli.main, ("me/model", "OUT", "--no-calibration", "--push-to-hub", "me/new")),
    "inspect --json": (fut_runtime.artifact.cli.main, ("inspect", "me/artifact", "--json")),
    "verify --json": (fut_runtime.artifact.cli.main, ("verify", "me/artifact", "--json")),
    "upload --json": (fut_runtime.artifact.cli.main, ("upload", "ARTIFACT", "me/new", "--json")),
    "info --json": (fut_runtime.cli.main, ("info", "me/artifact", "--json")),
}

#: A server, or a proxy before it, that says back what it was told.
FAULTS = (
    *(Fault("", status, error="bad token TOKEN", times=99) for status in (400, 401, 403, 404, 409, 429, 500)),
    Fault("/api/", 200, error="TOKEN is no JSON of mine", times=99),
    Fault("resolve", cut=3, times=99),
)


CASES = [
    *((name, None) for name in COMMANDS),
    *((name, fault) for name in ("convert", "inspect --json", "upload --json") for fault in FAULTS),
]


@pytest.mark.parametrize(
    ("name", "fault"), CASES, ids=[f"{n}-{'none' if f is None else f.request + str(f.status)}" for n, f in CASES]
)
def test_no_command_says_the_token(
    hub: LocalHub,
    token: str,
    name: str,
    fault: Fault | None,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    waits: list[float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    artifact = write_artifact(tmp_path / "artifact")
    for repo, folder in (("me/model", tiny_checkpoint("model", layers=1)), ("me/artifact", artifact)):
        hub.publish(repo, {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()})
    if fault is not None:
        hub.faults = [replace(fault, error=fault.error.replace("TOKEN", token))]
    command, arguments = COMMANDS[name]
    places = {"OUT": str(tmp_path / "out"), "ARTIFACT": str(artifact)}
    with caplog.at_level(logging.DEBUG):
        code, said = spoken(command, *(places.get(argument, argument) for argument in arguments))
    assert hub.asked and token not in said and (code == 0 or fault is not None)
    # Libraries below huggingface_hub spell whole answers out where somebody asks for that.
    own = [record for record in caplog.records if record.name.startswith(("fut_", "huggingface_hub"))]
    assert not [record for record in own if token in record.getMessage()]
    for path in (tmp_path / "out").rglob("*"):
        assert not path.is_file() or token.encode() not in path.read_bytes()


def test_redaction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "mine")
    text = f"{SECRET} and mine at https://me:word@host/x, mail me@host"
    assert redacted(text) == "hf_… and … at https://host/x, mail me@host"
    assert Repository("a/b", endpoint="https://me:word@host/").page == "https://host/a/b"


def test_the_hubs_address_is_shown_without_its_password(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://me:word@127.0.0.1:9")
    with pytest.raises(HubError, match=r"http://127\.0\.0\.1:9") as caught:
        resolve_artifact("me/model")
    assert "word" not in str(caught.value)


def test_the_library_logs_no_password(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch, waits: list[float], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for module, name, value in client_settings("http://me:word@127.0.0.1:9", tmp_path):
        monkeypatch.setattr(module, name, value, raising=False)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    with pytest.raises(FutError):
        open_source("me/model")
    logging.getLogger("huggingface_hub.utils._http").warning("asked with %s", SECRET)
    assert "asked with …" in caplog.text and "word" not in caplog.text
    # Versions that try again say so.
    assert "127.0.0.1:9/me/model" in caplog.text or not waits
