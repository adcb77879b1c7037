"""Whole prompts of small models as the library runs them, kernel after kernel, against the reference backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from emulation.host_backend import host_backend
from fut_convert import convert
from fut_runtime.artifact.reader import Artifact
from fut_runtime.cuda.library import CudaCallError, Library
from fut_runtime.cuda.prefill import Chunk
from fut_runtime.errors import CacheFullError
from prefill_scenario import against_reference, prompt_of, same_alone_and_in_company
from synthetic_checkpoint import CheckpointShape, write_checkpoint

pytestmark = pytest.mark.slow  # whole models, several calls each

PAGES = 8
SHAPES = {
    "llama": CheckpointShape(max_positions=160, vocab_size=300),
    "qwen3, groups of 3": CheckpointShape("qwen3", 64, 96, layers=2, heads=3, max_positions=160, vocab_size=300),
    "qwen2, head_dim 80": CheckpointShape("qwen2", 160, layers=2, head_dim=80, max_positions=160, vocab_size=300),
}


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large clusters take the emulation long, and these tests need none."""
    monkeypatch.setenv("EMULATED_MULTIPROCESSORS", "2")


def made(shape: str, directory: Path) -> Artifact:
    checkpoint = write_checkpoint(directory / "model", SHAPES[shape])
    overrides = {"weights": ["e4m3", "int4", "bf16"], "calibration.enabled": False}
    return Artifact.open(convert(str(checkpoint), directory / "out", overrides=overrides).path)


@pytest.mark.parametrize(
    ("shape", "prefill_mode", "scale_mode", "decode_mode", "kv_cache"),
    [
        ("llama", "e4m3", "request", "int4", "int4"),
        ("llama", "e4m3", "delayed", "fp8", "bf16"),
        ("llama", "bf16", "request", "bf16", "bf16"),
        ("qwen3, groups of 3", "e4m3", "frozen", "int4", "int4"),
        ("qwen2, head_dim 80", "e4m3", "delayed", "int4", "int4"),
        ("qwen2, head_dim 80", "bf16", "request", "int4", "int4"),
    ],
)
def test_prompts_and_what_follows_give_the_references_logits(
    emulated: Library,
    shape: str,
    prefill_mode: str,
    scale_mode: str,
    decode_mode: str,
    kv_cache: str,
    tmp_path: Path,
) -> None:
    artifact = made(shape, tmp_path)
    modes = {"prefill_mode": prefill_mode, "scale_mode": scale_mode, "decode_mode": decode_mode, "kv_cache": kv_cache}
    # Fewer rows a run than the first call has.
    against_reference(artifact, lambda: host_backend(emulated, artifact, pages=PAGES, rows=50, **modes), **modes)


def test_a_prompt_gets_the_same_bits_alone_and_in_company(emulated: Library, tmp_path: Path) -> None:
    backend = host_backend(emulated, made("llama", tmp_path), "int4", "int4", pages=PAGES, prefill_mode="e4m3")
    same_alone_and_in_company(backend, [3, 66, 17])
    backend.release()


def test_history_is_held_until_the_first_decode_step(emulated: Library, tmp_path: Path) -> None:
    backend = host_backend(emulated, made("llama", tmp_path), "int4", "int4", pages=4, prefill_mode="e4m3")
    first = backend.open_request(150)
    assert backend.prefill([(first, prompt_of(70, 1, 300))]).isfinite().all()
    # Pages of the cache are left, of the history too; a third request needs what the first one holds.
    second = backend.open_request(60)
    with pytest.raises(CacheFullError):
        backend.open_request(10)
    backend.decode([(first, 5)])
    backend.prefill([(second, [5, 6]), (first, [7, 8, 9])])
    assert backend._requests[first].length == 74
    backend.release()


def test_runs_out_of_range_are_refused(emulated: Library, tmp_path: Path) -> None:
    backend = host_backend(emulated, made("llama", tmp_path), "int4", "int4", pages=PAGES, prefill_mode="e4m3")
    assert backend._prompts is not None
    prefill = backend._prompts._prefill
    for chunks, reason in (
        ([Chunk(0, 0, [300])], "row 0: token 300"),
        ([Chunk(0, 159, [1, 2])], "2 tokens from position 159"),
        ([Chunk(0, 0, [1]), Chunk(0, 1, [1])], "request 1: slot 0"),
        ([Chunk(-1, 0, [1])], "slot -1"),
        ([Chunk(0, 0, [1] * 65), Chunk(1, 0, [1] * 64)], "129 rows, expected at most 128"),
    ):
        with pytest.raises(CudaCallError, match=reason):
            prefill.run(chunks)
    with pytest.raises(CudaCallError, match="the last run has 0"):
        prefill.logits(0, torch.empty(1, 300))
    backend.release()
