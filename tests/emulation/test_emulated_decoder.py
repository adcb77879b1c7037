"""Whole steps of small models as the library runs them, kernel after kernel, against the reference backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from emulation.host_backend import host_backend
from fut_convert import convert
from fut_runtime.artifact.reader import Artifact
from fut_runtime.cuda.decoder import Row
from fut_runtime.cuda.library import CudaCallError, Library
from fut_runtime.reference import backend as reference
from reference_noise import NOISE_MARGIN, logits_and_noise
from synthetic_checkpoint import CheckpointShape, write_checkpoint

PAGES = 8


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large clusters take the emulation long, and these tests need none."""
    monkeypatch.setenv("EMULATED_MULTIPROCESSORS", "2")


def made(shape: CheckpointShape, directory: Path) -> Artifact:
    checkpoint = write_checkpoint(directory / "model", shape)
    overrides = {"weights": ["e4m3", "int4", "bf16"], "calibration.enabled": False}
    return Artifact.open(convert(str(checkpoint), directory / "out", overrides=overrides).path)


SHAPES = {
    "llama": CheckpointShape(max_positions=160, vocab_size=300),
    "qwen3, groups of 3": CheckpointShape("qwen3", 64, 96, layers=1, heads=3, max_positions=160, vocab_size=300),
    "qwen2, head_dim 80": CheckpointShape("qwen2", 160, layers=1, head_dim=80, max_positions=160, vocab_size=300),
}


def prompts_of(*lengths: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize(
    ("shape", "decode_mode", "kv_cache", "begun"),
    [
        ("llama", "int4", "int4", 64),
        ("llama", "fp8", "int4", 12),
        ("llama", "bf16", "bf16", 12),
        ("qwen3, groups of 3", "int4", "int4", 12),
        ("qwen2, head_dim 80", "fp8", "bf16", 64),
    ],
)
def test_steps_give_the_references_logits(
    emulated: Library, shape: str, decode_mode: str, kv_cache: str, begun: int, tmp_path: Path
) -> None:
    artifact = made(SHAPES[shape], tmp_path)
    ids, others = prompts_of(begun + 12, 9, seed=1)
    backend = host_backend(emulated, artifact, decode_mode, kv_cache, pages=PAGES)
    # A page is left out, so that those of the longer request do not follow one another.
    before, between = (backend.open_request(10) for _ in range(2))
    backend.close_request(before)
    long, short = backend.open_request(len(ids)), backend.open_request(len(others))
    backend.close_request(between)
    # Two chunks, with 64 tokens in the first more than a page, all logits of the first; then two requests a step.
    (first,) = backend.prompt_logits(long, ids[:begun])
    found = dict(enumerate(first.clone()))
    after = begun + 8
    found[after - 1] = backend.prefill([(long, ids[begun:after])])[0]
    theirs = {5: backend.prefill([(short, others[:6])])[0]}
    for i in range(3):
        theirs[6 + i], found[after + i] = backend.decode([(short, others[6 + i]), (long, ids[after + i])])
    found[after + 3] = backend.decode([(long, ids[after + 3])])[0]
    backend.release()
    loaded = reference.load(artifact, decode_mode=decode_mode, prefill_mode="decode", kv_cache=kv_cache)
    for rows, tokens in ((found, ids), (theirs, others)):
        exact, noise = logits_and_noise(loaded, tokens)
        at = sorted(rows)
        difference = (torch.stack([rows[i] for i in at]).double() - exact[at]).square().mean().sqrt()
        print(f"{decode_mode} {kv_cache}: rms difference {difference:.2e}, noise {noise:.2e}")
        assert difference <= NOISE_MARGIN * noise


def test_a_request_gets_the_same_bits_alone_and_in_company(emulated: Library, tmp_path: Path) -> None:
    backend = host_backend(emulated, made(SHAPES["llama"], tmp_path), "int4", "int4", pages=PAGES)
    prompts = prompts_of(2, 11, 5, seed=3)
    requests = [backend.open_request(20) for _ in range(6)]
    for request, prompt in zip(requests, prompts * 2, strict=True):
        backend.prefill([(request, prompt[:-1])])
    together = backend.decode([(request, prompt[-1]) for request, prompt in zip(requests[:3], prompts, strict=True)])
    for request, prompt, row in zip(requests[3:], prompts, together, strict=True):
        assert torch.equal(backend.decode([(request, prompt[-1])])[0], row)
    backend.release()


def test_steps_out_of_range_are_refused(emulated: Library, tmp_path: Path) -> None:
    backend = host_backend(emulated, made(SHAPES["llama"], tmp_path), "int4", "int4", pages=PAGES)
    for row, reason in ((Row(300, 0, 0), "token 300"), (Row(1, 160, 0), "position 160"), (Row(1, 0, -1), "slot -1")):
        with pytest.raises(CudaCallError, match=reason):
            backend._decoder.step([row], [0])
    backend.release()
