"""The CUDA backend over the emulated library: every line of it but the memory and the choice of tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from fut_runtime.artifact.reader import Artifact
from fut_runtime.backend import Draw
from fut_runtime.cuda.activations import initial_scales
from fut_runtime.cuda.arena import ArenaPlan, fill
from fut_runtime.cuda.backend import CudaBackend
from fut_runtime.cuda.decoder import Decoder, Row
from fut_runtime.cuda.library import Library
from fut_runtime.cuda.memory_plan import (
    MAX_ROWS,
    MAX_SLOTS,
    choose_cache,
    decoder_config,
    loaded_formats,
    page_bytes,
)
from fut_runtime.cuda.pages import PageAllocator
from fut_runtime.cuda.prefill_weights import choose_prefill_mode
from fut_runtime.cuda.prompt_memory import PromptMemory
from fut_runtime.cuda.structs import DecoderConfig
from fut_runtime.cuda.tensors import DECODE_FORMATS, DeviceTensors, needed_tensors
from fut_runtime.rope import rope_tables
from fut_runtime.sampling import Sampler, SamplingParams

#: At least what `fut_prefill_attention_workspace_bytes` says.
_COUNTER_BYTES = 256


class HostDecoder(Decoder):
    """A decoder of the emulated library, with host memory in place of a card's; the host chooses the tokens."""

    def __init__(self, library: Library, config: DecoderConfig) -> None:
        self.library, self._config, self._about, self._broken = library, config, "emulated", None
        self._handle = ctypes.c_void_p()
        self._workspace = aligned(library.fut_decoder_workspace_bytes(ctypes.byref(config))).zero_()
        config.workspace, config.workspace_bytes = self._workspace.data_ptr(), self._workspace.numel()
        library.call("fut_decoder_create", ctypes.byref(config), ctypes.byref(self._handle))
        first = library.fut_decoder_logits(self._handle) - self._workspace.data_ptr()
        count = MAX_ROWS * config.vocab
        self._logits = self._workspace[first : first + 4 * count].view(torch.float32).view(MAX_ROWS, config.vocab)
        self._draws: Sequence[Draw | None] = ()

    def step(
        self,
        rows: Sequence[Row],
        head_rows: Sequence[int],
        draws: Sequence[Draw | None] | None = None,
        *,
        chunked: bool = False,
    ) -> None:
        self._draws = draws or ()
        super().step(rows, head_rows, None, chunked=chunked)

    def tokens(self, count: int) -> list[int]:
        pairs = zip(self._logits[:count], self._draws, strict=True)
        return [-1 if draw is None else chosen(row, draw) for row, draw in pairs]

    def close(self) -> None:
        self.library.fut_decoder_destroy(self._handle)

    def stream(self) -> int:
        return 0

    def call(self, name: str, *arguments: object, about: str = "") -> None:
        self.library.call(name, *arguments, about=about)


def chosen(logits: Tensor, draw: Draw) -> int:
    """What the host's sampler takes with the draw's number."""
    params = SamplingParams(temperature=draw.temperature, top_k=draw.top_k, top_p=draw.top_p, min_p=draw.min_p)
    sampler = Sampler(params, ())
    sampler._uniform = draw.uniform
    return sampler.choose(logits)[0]


def host_backend(
    library: Library,
    artifact: Artifact,
    decode_mode: str,
    kv_cache: str,
    *,
    pages: int,
    slots: int = MAX_SLOTS,
    prefill_mode: str = "decode",
    scale_mode: str = "request",
    rows: int = 128,
) -> CudaBackend:
    """An artifact in the CUDA backend over the emulated library; what no token has written yet is NaN.

    `rows`: most tokens of a run of prompts.
    """
    manifest, spec = artifact.manifest, artifact.manifest.model
    cache, weight_format = choose_cache(manifest, kv_cache), DECODE_FORMATS[decode_mode]
    choice = choose_prefill_mode(manifest, prefill_mode)
    plan = ArenaPlan.of(needed_tensors(manifest, *loaded_formats(weight_format, choice)))
    arena = aligned(plan.nbytes)
    tensors = DeviceTensors(manifest, weight_format, plan.views(arena))
    tensors.tensors["embed"][spec.vocab_size :].zero_()
    fill(arena, plan.pieces(artifact))
    context = spec.max_position_embeddings
    rope = [t.contiguous() for t in rope_tables(spec, torch.arange(context))]
    pool = aligned(pages * page_bytes(spec, cache)).fill_(0xFF)
    config = decoder_config(
        tensors,
        cache,
        context_tokens=context,
        pages=pages,
        embed=tensors.tensors["embed"].data_ptr(),
        rope=(rope[0].data_ptr(), rope[1].data_ptr()),
        pool=pool.data_ptr(),
    )
    decoder, allocator = HostDecoder(library, config), PageAllocator(pages, slots)
    memory: list[object] = [arena, tensors, pool, *rope]
    prompts = None
    if choice.weight_format is not None:
        planned = PromptMemory(choice, manifest, rows, pages, 0, scale_mode)
        prompts = planned.build(tensors.tensors, decoder, config, initial_scales(artifact), memory, take)
    return CudaBackend(decoder, allocator, spec, torch.device("cpu"), decode_mode, context, memory, prompts)


def take(nbytes: int, device: torch.device, what: str, *, zero: bool = False) -> Tensor:
    """What `allocate` does on a card, NaN but for the counters of attention, which lie at the beginning."""
    memory = aligned(nbytes).fill_(0xFF)
    if zero:
        memory[:_COUNTER_BYTES].zero_()
    return memory


def aligned(nbytes: int) -> Tensor:
    """Host memory uint8 [nbytes] at a multiple of 256."""
    raw = torch.empty(nbytes + 256, dtype=torch.uint8)
    offset = -raw.data_ptr() % 256
    return raw[offset : offset + nbytes]
