"""The proof that prefill is right, `benchmarks/prefill_accuracy.py`, over the emulated kernels; and how it fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from emulation.host_backend import host_backend
from fut_convert import convert
from fut_runtime.artifact.reader import Artifact
from fut_runtime.cuda.library import Library
from repository import REPOSITORY
from synthetic_checkpoint import CheckpointShape, write_checkpoint

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import prefill_accuracy

WINDOWS = torch.randint(3, 300, (2, 14), generator=torch.Generator().manual_seed(1))


def made(directory: Path, seed: int) -> Artifact:
    shape = CheckpointShape(layers=1, max_positions=160, vocab_size=300, seed=seed)
    checkpoint = write_checkpoint(directory / f"model{seed}", shape)
    overrides = {"weights": ["e4m3", "int4", "bf16"], "calibration.enabled": False}
    return Artifact.open(convert(str(checkpoint), directory / f"out{seed}", overrides=overrides).path)


def test_other_weights_fail_and_the_same_pass(
    emulated: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMULATED_MULTIPROCESSORS", "2")
    artifact, other = made(tmp_path, 0), made(tmp_path, 1)
    loaded = other

    def load(_: Artifact, name: str, *, decode_mode: str, kv_cache: str, **options: object) -> object:
        assert name == "cuda" and options.pop("planned_requests") == 1
        assert options.pop("device") == "cpu" and options.pop("planned_tokens") == 14
        return host_backend(emulated, loaded, decode_mode, kv_cache, pages=2, **options)

    monkeypatch.setattr(prefill_accuracy, "load_backend", load)
    line = prefill_accuracy.measure(artifact, "e4m3", "prefill", WINDOWS, torch.device("cpu"))
    assert line["kl"]["mean"] > 0.05 and line["top1"]["mean"] < 0.5
    loaded = artifact
    for mode, protocol in (("e4m3", "serve"), ("bf16", "prefill")):
        line = prefill_accuracy.measure(artifact, mode, protocol, WINDOWS, torch.device("cpu"))
        assert line["passed"] and not line["faults"], line
        assert line["windows"] == 2 and line["kl"]["mean"] < 1e-2
