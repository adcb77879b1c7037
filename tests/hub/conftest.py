"""A Hub of the tests' own, which huggingface_hub takes for the only one, with a cache and no token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from hub_client import client_settings
from local_hub import LocalHub, serve


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    state = LocalHub()
    with serve(state) as address:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        for module, name, value in client_settings(address, tmp_path):
            monkeypatch.setattr(module, name, value, raising=False)
        yield state


@pytest.fixture
def login(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_writer")
    assert huggingface_hub.get_token() == "hf_writer"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that would have been waited, were it not for the tests."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds
