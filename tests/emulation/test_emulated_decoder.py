"""Whole steps of small models as the library runs them, kernel after kernel, against the reference backend."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emulation.conftest import EmulatedLibrary
from fut_convert import convert
from fut_runtime.artifact.reader import Artifact
from fut_runtime.cuda.arena import ArenaPlan, fill
from fut_runtime.cuda.memory_plan import choose_cache, decoder_config, page_bytes
from fut_runtime.cuda.structs import Status, Step
from fut_runtime.cuda.tensors import DECODE_FORMATS, DeviceTensors, needed_tensors
from fut_runtime.reference import backend as reference
from fut_runtime.rope import rope_tables
from reference_noise import NOISE_MARGIN, logits_and_noise
from synthetic_checkpoint import CheckpointShape, write_checkpoint

PAGES = 8


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large clusters take the emulation long, and these tests need none."""
    monkeypatch.setenv("EMULATED_MULTIPROCESSORS", "2")


def ints(values: Sequence[int]) -> ctypes.Array[c_int32]:
    return (c_int32 * len(values))(*values)


class EmulatedDecoder:
    """A decoder of the emulated library, with host memory in place of a card's."""

    def __init__(self, library: EmulatedLibrary, artifact: Artifact, decode_mode: str, kv_cache: str) -> None:
        self._library = library
        manifest, spec = artifact.manifest, artifact.manifest.model
        cache = choose_cache(manifest, kv_cache)
        weight_format = DECODE_FORMATS[decode_mode]
        plan = ArenaPlan.of(needed_tensors(manifest, weight_format))
        arena = _aligned(plan.nbytes)
        tensors = DeviceTensors(manifest, weight_format, plan.views(arena))
        tensors.tensors["embed"][spec.vocab_size :].zero_()
        fill(arena, plan.pieces(artifact))
        rope = [t.contiguous() for t in rope_tables(spec, torch.arange(spec.max_position_embeddings))]
        # What no token has written yet is NaN wherever it is read as a number.
        pool = _aligned(PAGES * page_bytes(spec, cache)).fill_(0xFF)
        self._config = decoder_config(
            tensors,
            cache,
            context_tokens=spec.max_position_embeddings,
            pages=PAGES,
            embed=tensors.tensors["embed"].data_ptr(),
            rope=(rope[0].data_ptr(), rope[1].data_ptr()),
            pool=pool.data_ptr(),
        )
        workspace = _aligned(library.fut_decoder_workspace_bytes(ctypes.byref(self._config))).zero_()
        self._config.workspace, self._config.workspace_bytes = workspace.data_ptr(), workspace.numel()
        self._memory = [arena, tensors, pool, workspace, *rope]
        self._vocab = spec.vocab_size
        self._handle = ctypes.c_void_p()
        library.call("fut_decoder_create", ctypes.byref(self._config), ctypes.byref(self._handle))

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        self._library.call("fut_decoder_set_pages", self._handle, slot, 0, ints(pages), len(pages), None)

    def step(self, rows: Sequence[tuple[int, int, int]], head_rows: Sequence[int], *, chunked: bool) -> Tensor:
        """Run (token, position, slot) rows; logits FP32 [head rows, vocab]."""
        tokens, positions, slots = (ints(column) for column in zip(*rows, strict=True))
        step = Step(
            rows=len(rows), chunked=int(chunked), token=tokens, position=positions, slot=slots,
            head_rows=len(head_rows), head_row=ints(head_rows), sampling=None,
        )  # fmt: skip
        self._library.call("fut_decoder_step", self._handle, ctypes.byref(step), None)
        address = self._library.fut_decoder_logits(self._handle)
        count = len(head_rows) * self._vocab
        logits = torch.tensor((ctypes.c_float * count).from_address(address))
        return logits.view(len(head_rows), self._vocab)

    def prompt(self, slot: int, ids: Sequence[int]) -> Tensor:
        """A prompt in one chunk; logits after its last token."""
        rows = [(token, position, slot) for position, token in enumerate(ids)]
        return self.step(rows, [len(rows) - 1], chunked=True)[0]

    def refused(self, **changed: int) -> str:
        """Why a step of one row is refused."""
        row = {"token": 1, "position": 0, "slot": 0} | changed
        step = Step(
            rows=1, chunked=0, token=ints([row["token"]]), position=ints([row["position"]]), slot=ints([row["slot"]]),
            head_rows=1, head_row=ints([0]), sampling=None,
        )  # fmt: skip
        assert self._library.fut_decoder_step(self._handle, ctypes.byref(step), None) == Status.INVALID
        return str(self._library.fut_last_error().decode())

    def close(self) -> None:
        self._library.fut_decoder_destroy(self._handle)


def _aligned(nbytes: int) -> Tensor:
    raw = torch.empty(nbytes + 256, dtype=torch.uint8)
    offset = -raw.data_ptr() % 256
    return raw[offset : offset + nbytes]


def made(shape: CheckpointShape, directory: Path) -> Artifact:
    checkpoint = write_checkpoint(directory / "model", shape)
    overrides = {"weights": ["e4m3", "int4", "bf16"], "calibration.enabled": False}
    return Artifact.open(convert(str(checkpoint), directory / "out", overrides=overrides).path)


SHAPES = {
    "llama": CheckpointShape(max_positions=160, vocab_size=300),
    "qwen3, groups of 3": CheckpointShape("qwen3", 64, 96, layers=1, heads=3, max_positions=160, vocab_size=300),
    "qwen2, head_dim 80": CheckpointShape("qwen2", 160, layers=1, head_dim=80, max_positions=160, vocab_size=300),
}


@pytest.mark.parametrize(
    ("shape", "decode_mode", "kv_cache"),
    [
        ("llama", "int4", "int4"),
        ("llama", "fp8", "int4"),
        ("llama", "bf16", "bf16"),
        ("qwen3, groups of 3", "int4", "int4"),
        ("qwen2, head_dim 80", "fp8", "bf16"),
    ],
)
def test_steps_give_the_references_logits(
    emulated: EmulatedLibrary, shape: str, decode_mode: str, kv_cache: str, tmp_path: Path
) -> None:
    artifact = made(SHAPES[shape], tmp_path)
    generator = torch.Generator().manual_seed(1)
    ids, others = (torch.randint(3, 300, (n,), generator=generator).tolist() for n in (76, 9))
    decoder = EmulatedDecoder(emulated, artifact, decode_mode, kv_cache)
    decoder.set_pages(0, [5, 2])
    decoder.set_pages(3, [7])
    # More than a page, in two chunks; then two requests a step.
    found = {63: decoder.step([(t, i, 0) for i, t in enumerate(ids[:64])], [63], chunked=True)[0]}
    found[71] = decoder.step([(t, 64 + i, 0) for i, t in enumerate(ids[64:72])], [7], chunked=True)[0]
    theirs = {5: decoder.prompt(3, others[:6])}
    for i in range(3):
        both = decoder.step([(others[6 + i], 6 + i, 3), (ids[72 + i], 72 + i, 0)], [0, 1], chunked=False)
        theirs[6 + i], found[72 + i] = both
    found[75] = decoder.step([(ids[75], 75, 0)], [0], chunked=False)[0]
    decoder.close()
    loaded = reference.load(artifact, decode_mode=decode_mode, prefill_mode="decode", kv_cache=kv_cache)
    for rows, tokens in ((found, ids), (theirs, others)):
        exact, noise = logits_and_noise(loaded, tokens)
        at = sorted(rows)
        difference = (torch.stack([rows[i] for i in at]).double() - exact[at]).square().mean().sqrt()
        print(f"{decode_mode} {kv_cache}: rms difference {difference:.2e}, noise {noise:.2e}")
        assert difference <= NOISE_MARGIN * noise


def test_a_request_gets_the_same_bits_alone_and_in_company(emulated: EmulatedLibrary, tmp_path: Path) -> None:
    artifact = made(SHAPES["llama"], tmp_path)
    prompts = [torch.randint(3, 300, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 17, 9)]
    decoder = EmulatedDecoder(emulated, artifact, "int4", "int4")
    for slot in range(6):
        decoder.set_pages(slot, [slot])
    for slot, prompt in enumerate(prompts):
        decoder.prompt(slot, prompt[:-1])
        decoder.prompt(3 + slot, prompt[:-1])
    rows = [(prompt[-1], len(prompt) - 1, slot) for slot, prompt in enumerate(prompts)]
    together = decoder.step(rows, [0, 1, 2], chunked=False)
    for index, (token, position, slot) in enumerate(rows):
        alone = decoder.step([(token, position, 3 + slot)], [0], chunked=False)
        assert torch.equal(alone[0], together[index])
    assert "token 300" in decoder.refused(token=300)
    assert "position 160" in decoder.refused(position=160)
    assert "slot -1" in decoder.refused(slot=-1)
    decoder.close()
