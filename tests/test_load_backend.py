"""Which backend an artifact is loaded into: what was asked for, or the first that can do it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fut_runtime import backend as backend_module
from fut_runtime.artifact.reader import Artifact
from fut_runtime.backend import BackendStatus, load_backend
from fut_runtime.cuda.load import load as load_cuda
from fut_runtime.errors import UnsupportedError
from tiny_artifact import make_manifest, write_artifact


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return Artifact.open(write_artifact(tmp_path / "out", make_manifest()))


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Two backends that work here, of which `cuda` does not know E4M3 prefill."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def module(name: str) -> str:
        made = ModuleType(f"loading_{name}")

        def load(artifact: Artifact, **options: Any) -> str:
            calls.append((name, options))
            if name == "cuda" and options.get("prefill_mode") == "e4m3":
                raise UnsupportedError("the CUDA backend has no prefill_mode 'e4m3'")
            return name

        made.load = load  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, made.__name__, made)
        return made.__name__

    names = ("cuda", "reference")
    monkeypatch.setattr(backend_module, "_MODULES", {name: module(name) for name in names})
    monkeypatch.setattr(backend_module, "available_backends", lambda: [BackendStatus(n, True, "") for n in names])
    monkeypatch.setattr(backend_module, "_default_device", lambda: "cuda")
    monkeypatch.setattr(backend_module, "check_device", lambda name: None)
    return calls


def test_auto_takes_the_first_that_works(artifact: Artifact, loads: list[tuple[str, dict[str, Any]]]) -> None:
    assert load_backend(artifact, decode_mode=None, kv_cache="bf16") == "cuda"  # type: ignore[comparison-overlap]
    assert loads == [("cuda", {"device": "cuda", "kv_cache": "bf16"})]


def test_auto_takes_one_that_runs_on_the_device(artifact: Artifact, loads: list[tuple[str, dict[str, Any]]]) -> None:
    load_backend(artifact, device="cpu")
    assert [name for name, _ in loads] == ["reference"]


def test_auto_takes_one_that_has_the_options_and_says_so(
    artifact: Artifact, loads: list[tuple[str, dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_backend(artifact, prefill_mode="e4m3")
    assert [name for name, _ in loads] == ["cuda", "reference"]
    assert "no prefill_mode 'e4m3'; taking the reference backend" in caplog.text


def test_a_backend_that_was_asked_for_is_not_replaced(
    artifact: Artifact, loads: list[tuple[str, dict[str, Any]]]
) -> None:
    with pytest.raises(UnsupportedError, match="no prefill_mode"):
        load_backend(artifact, "cuda", prefill_mode="e4m3")
    assert [name for name, _ in loads] == ["cuda"]
    with pytest.raises(UnsupportedError, match=r"expected auto, cuda or reference"):
        load_backend(artifact, "tpu")


def test_cuda_names_what_it_lacks_before_anything_is_loaded(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedError, match="device is cpu, expected a CUDA card"):
        load_cuda(artifact, device="cpu")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GeForce")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(UnsupportedError, match=r"cuda:0 is GeForce of compute capability 8\.9; .* Hopper card"):
        load_cuda(artifact)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for options, remedy in (
        ({"compute": "fp32"}, "no compute 'fp32': choose compute exact"),
        ({"scale_mode": "frozen", "prefill_mode": "decode"}, "prefill_mode decode: scales belong to e4m3"),
    ):
        with pytest.raises(UnsupportedError, match=remedy):
            load_cuda(artifact, **options)  # type: ignore[arg-type]
