"""`benchmarks/soak_decode.py` in small: a right backend passes, and every kind of fault is found."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fut_convert import convert
from fut_runtime.artifact.reader import Artifact
from fut_runtime.reference import backend as reference
from fut_runtime.reference.backend import ReferenceBackend
from repository import REPOSITORY
from synthetic_checkpoint import CheckpointShape, write_checkpoint
from test_paged_requests import make

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import soak_decode
from soak_traffic import Traffic

CPU = torch.device("cpu")
SIZES = {"steps": 48, "probe_every": 8, "most_open": 5, "longest": 72}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    directory = tmp_path_factory.mktemp("soak")
    checkpoint = write_checkpoint(directory / "model", CheckpointShape(layers=3, vocab_size=300))
    overrides = {"calibration.enabled": False, "int4.scale_method": "absmax_7"}
    return Artifact.open(convert(str(checkpoint), directory / "out", overrides=overrides).path)


@pytest.fixture
def loaded(artifact: Artifact) -> ReferenceBackend:
    return reference.load(artifact, prefill_mode="decode")


def soak(backend: object, loaded: object, **sizes: int) -> dict[str, Any]:
    return soak_decode.soak(backend, loaded, CPU, **(SIZES | sizes))  # type: ignore[arg-type]


def test_the_reference_backend_passes(artifact: Artifact, loaded: ReferenceBackend) -> None:
    line = soak(reference.load(artifact, prefill_mode="decode"), loaded)
    assert line["faults"] == [] and line["probes"] == 6
    assert min(line[name] for name in ("joined", "decode calls", "prompt calls", "finished")) > 3


def test_pages_interruptions_and_a_full_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA backend over a decoder that keeps tokens in pages."""
    monkeypatch.setattr(soak_decode.Probes, "against", lambda *_: (0.0, 1.0))
    interrupted = []
    interrupt = soak_decode._interrupt
    monkeypatch.setattr(soak_decode, "_interrupt", lambda *a: (interrupted.append(a), interrupt(*a)))
    backend, decoder = make(pages=12, slots=30, context=200)
    line = soak(backend, None, steps=120, probe_every=20, longest=170, most_open=20)
    assert line["faults"] == [] and len(interrupted) == 3
    assert line["no room"] > 0 and line["refused"] > 0
    assert max(rows for rows, _, _ in decoder.steps) == 64


def test_drift_is_found(artifact: Artifact, loaded: ReferenceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    tested = reference.load(artifact, prefill_mode="decode")
    decode, calls = tested.decode, []

    def drifting(tokens: Sequence[tuple[int, int]]) -> Tensor:
        calls.append(tokens)
        return decode(tokens) * (1 + 1e-6 * (len(calls) > 250))

    monkeypatch.setattr(tested, "decode", drifting)
    line = soak(tested, loaded)
    assert not line["passed"] and line["faults"][0].endswith("probes differ from the first")
    assert 0 < line["drifted"] < 6


def test_wrong_logits_are_found(artifact: Artifact, loaded: ReferenceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    tested = reference.load(artifact, prefill_mode="decode")
    decode = tested.decode
    monkeypatch.setattr(tested, "decode", lambda tokens: decode(tokens) * 1.2)
    assert "from the reference's" in soak(tested, loaded, steps=8)["faults"][0]


def test_pages_that_are_not_given_back_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_decode.Probes, "against", lambda *_: (0.0, 1.0))
    backend, _ = make(pages=40, slots=60, context=200)
    close, calls = backend.close_request, []

    def forgetful(request: int) -> None:
        calls.append(request)
        if len(calls) != 30:
            close(request)

    monkeypatch.setattr(backend, "close_request", forgetful)
    faults = soak(backend, None)["faults"]
    assert len(faults) == 1 and "1 slots and" in faults[0]


def test_memory_that_grows_is_found() -> None:
    steady = [{"rss": 500 << 20, "allocated": 7, "free": 9 << 30} for _ in range(8)]
    assert soak_decode.memory_faults(steady) == []
    grown = [{**sample, "rss": sample["rss"] + (8 << 20) * i} for i, sample in enumerate(steady)]
    assert "grew by" in soak_decode.memory_faults(grown)[0]
    assert "tensors on the device" in soak_decode.memory_faults([*steady, {**steady[0], "allocated": 8}])[0]
    assert "free memory" in soak_decode.memory_faults([*steady, {**steady[0], "free": 8 << 30}])[0]


def test_the_same_seed_gives_the_same_traffic(artifact: Artifact) -> None:
    counts = []
    for _ in range(2):
        traffic = Traffic(reference.load(artifact, prefill_mode="decode"), random.Random(3), 4, 40)
        for _ in range(25):
            traffic.step()
        traffic.close()
        counts.append(traffic.counts)
    assert counts[0] == counts[1]


def test_the_command_line(artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    monkeypatch.setattr(soak_decode, "PROBES", ((40, 12),))
    out = tmp_path / "lines.jsonl"
    sizes = ["--steps", "10", "--probe-every", "2", "--most-open", "3", "--longest", "20"]
    run = CliRunner().invoke(
        soak_decode.main, [str(artifact.path), "--backend", "reference", *sizes, "--out", str(out)]
    )
    assert run.exit_code == 0, run.output
    assert '"passed": true' in out.read_text()
