"""The proof that decoding is right, `benchmarks/decode_accuracy.py`, over the emulated kernels; and how it fails."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emulation.host_backend import host_backend
from fut_convert import convert
from fut_runtime.artifact.reader import Artifact
from fut_runtime.cuda import operations
from fut_runtime.cuda.library import Library
from fut_runtime.evaluate.perplexity import Estimate, PerplexityResult
from repository import REPOSITORY
from synthetic_checkpoint import CheckpointShape, write_checkpoint

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import decode_accuracy
from layer_agreement import layer_faults


@pytest.fixture
def on_the_host(emulated: Library, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Backends and single operations run in the emulation, on tensors of the CPU."""

    def check(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], name: str) -> None:
        assert tensor.dtype == dtype and tuple(tensor.shape) == shape and tensor.is_contiguous(), name

    def workspace(nbytes: int, device: torch.device, *, zero: bool = True) -> Tensor:
        raw = torch.zeros(nbytes + 512, dtype=torch.uint8)
        return raw[-raw.data_ptr() % 256 :][: max(nbytes, 16)]

    monkeypatch.setenv("EMULATED_MULTIPROCESSORS", "2")
    monkeypatch.setattr(operations, "library", lambda: emulated)
    monkeypatch.setattr(operations, "_check", check)
    monkeypatch.setattr(operations, "_workspace", workspace)
    monkeypatch.setattr(operations, "_stream", lambda tensor: 0)

    def load(artifact: Artifact, name: str, *, decode_mode: str, kv_cache: str, **options: object) -> object:
        assert name == "cuda" and options["planned_requests"] == 1
        return host_backend(emulated, artifact, decode_mode, kv_cache, pages=2)

    monkeypatch.setattr(decode_accuracy, "load_backend", load)
    return emulated


@pytest.mark.parametrize(("decode_mode", "kv_cache"), [("int4", "int4"), ("bf16", "bf16")])
def test_a_small_model_is_proved_right(on_the_host: Library, decode_mode: str, kv_cache: str, tmp_path: Path) -> None:
    shape = CheckpointShape("qwen3", 64, 96, layers=2, heads=3, max_positions=160, vocab_size=300)
    checkpoint = write_checkpoint(tmp_path / "model", shape)
    overrides = {"weights": ["e4m3", "int4", "bf16"], "calibration.enabled": False}
    artifact = Artifact.open(convert(str(checkpoint), tmp_path / "out", overrides=overrides).path)
    windows = torch.randint(3, 300, (2, 66), generator=torch.Generator().manual_seed(1))
    line = decode_accuracy.measure(artifact, decode_mode, kv_cache, windows, torch.device("cpu"), 1)
    print(decode_accuracy.summary(line))
    assert line["windows"] == 2 and line["kl"]["mean"] < 0.05
    layers = line["layers"]
    assert all(len(values) == 2 for values in layers.values())
    assert all(0 < value < 0.02 for value in layers["card_reference"] + layers["card_fp32"])
    assert min(layers["equal_codes"]) > 0.995


def test_what_breaks_the_contract_is_told() -> None:
    nll = Estimate(3.0, 0.1)
    good = PerplexityResult(4, 8, 20.0, nll, 20.0, Estimate(2.9e-4, 1e-4), Estimate(1e-4, 1e-5), Estimate(0.99, 0.01))
    assert decode_accuracy.window_faults(good) == []
    for difference in (Estimate(3.1e-4, 1e-4), Estimate(-3.1e-4, 1e-4), Estimate(0.0, float("nan"))):
        assert len(decode_accuracy.window_faults(replace(good, nll_difference=difference))) == 1
    found = {"card_reference": [3e-3, 4e-3], "fp64_sums_reference": [1e-3, 1e-3], "equal_codes": [0.9995, 0.998]}
    faults = layer_faults(found)
    assert [fault.partition(":")[0] for fault in faults] == ["layer 1", "layer 1"]
    assert layer_faults({"card_reference": [float("nan")], "fp64_sums_reference": [0.0], "equal_codes": [1.0]})
