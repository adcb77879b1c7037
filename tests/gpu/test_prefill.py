"""Prefill on the card: the decode cache's copy of the history, and whole models against the reference backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attention_setup import Shape
from cache_copy_checks import CASES, check_copy
from fut_convert import convert
from fut_runtime.artifact.reader import Artifact
from fut_runtime.cuda import load as cuda
from fut_runtime.cuda.backend import CudaBackend
from fut_runtime.cuda.library import library
from odd_checkpoints import ODD_CHECKPOINTS
from prefill_scenario import against_reference, same_alone_and_in_company

pytestmark = pytest.mark.usefixtures("built")

FORMATS = ["e4m3", "int4", "bf16"]
#: prefill_mode, scale_mode, decode_mode, kv_cache
MODES = [
    ("e4m3", "request", "int4", "int4"),
    ("e4m3", "delayed", "fp8", "bf16"),
    ("e4m3", "frozen", "int4", "int4"),
    ("bf16", "request", "bf16", "bf16"),
]


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_the_copy_has_the_bytes_of_an_append(head_dim: int, bits: int, case: str) -> None:
    check_copy(Shape(8, 2, head_dim, bits=bits), case, library(), "cuda")


def converted(checkpoint: Path, out: Path) -> Artifact:
    overrides = {"weights": FORMATS, "calibration.enabled": False}
    return Artifact.open(convert(str(checkpoint), out, overrides=overrides, device="cuda").path)


def compare(
    artifact: Artifact, prefill_mode: str, scale_mode: str, decode_mode: str, kv_cache: str, scale: int
) -> None:
    modes = {"prefill_mode": prefill_mode, "decode_mode": decode_mode, "kv_cache": kv_cache, "scale_mode": scale_mode}
    given = modes if prefill_mode == "e4m3" else {k: v for k, v in modes.items() if k != "scale_mode"}
    against_reference(artifact, lambda: cuda.load(artifact, planned_requests=4, **given), scale, "cuda", **modes)


@pytest.mark.parametrize("modes", MODES[3:], ids="-".join)
def test_a_real_model_gives_the_references_logits(
    smollm2_dir: Path, modes: tuple[str, str, str, str], tmp_path: Path
) -> None:
    """With E4M3 its outliers make even the reference's logits anything: see `benchmarks/prefill_accuracy.py`."""
    compare(converted(smollm2_dir, tmp_path / "out"), *modes, scale=20)


@pytest.mark.parametrize("modes", MODES[:1] + MODES[3:], ids="-".join)
@pytest.mark.parametrize("name", list(ODD_CHECKPOINTS))
def test_odd_models_give_the_references_logits(
    name: str, modes: tuple[str, str, str, str], odd_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    compare(converted(odd_checkpoint(name), tmp_path / "out"), *modes, scale=1)


@pytest.fixture(scope="module")
def backend(odd_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[CudaBackend]:
    artifact = converted(odd_checkpoint("base"), tmp_path_factory.mktemp("base") / "out")
    loaded = cuda.load(artifact, prefill_mode="e4m3", planned_requests=16)
    yield loaded
    loaded.release()


def test_a_prompt_gets_the_same_bits_alone_and_in_company(backend: CudaBackend) -> None:
    same_alone_and_in_company(backend, [1, 200, 63, 64, 65, 17, 129, 2])
