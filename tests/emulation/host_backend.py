"""The CUDA backend over the emulated library: every line of it but the memory and the choice of tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from fut_runtime.artifact.reader import Artifact
from fut_runtime.backend import Draw
from fut_runtime.cuda.arena import ArenaPlan, fill
from fut_runtime.cuda.backend import CudaBackend
from fut_runtime.cuda.decoder import Decoder, Row
from fut_runtime.cuda.library import Library
from fut_runtime.cuda.memory_plan import MAX_ROWS, MAX_SLOTS, choose_cache, decoder_config, page_bytes
from fut_runtime.cuda.pages import PageAllocator
from fut_runtime.cuda.structs import DecoderConfig
from fut_runtime.cuda.tensors import DECODE_FORMATS, DeviceTensors, needed_tensors
from fut_runtime.rope import rope_tables
from fut_runtime.sampling import Sampler, SamplingParams


class HostDecoder(Decoder):
    """A decoder of the emulated library, with host memory in place of a card's; the host chooses the tokens."""

    def __init__(self, library: Library, config: DecoderConfig) -> None:
        self._library, self._config, self._about, self._broken = library, config, "emulated", None
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
        self._library.fut_decoder_destroy(self._handle)

    def _stream(self) -> int:
        return 0

    def _call(self, name: str, *arguments: object, about: str = "") -> None:
        self._library.call(name, self._handle, *arguments, about=about)


def chosen(logits: Tensor, draw: Draw) -> int:
    """What the host's sampler takes with the draw's number."""
    params = SamplingParams(temperature=draw.temperature, top_k=draw.top_k, top_p=draw.top_p, min_p=draw.min_p)
    sampler = Sampler(params, ())
    sampler._uniform = draw.uniform
    return sampler.choose(logits)[0]


def host_backend(
    library: Library, artifact: Artifact, decode_mode: str, kv_cache: str, *, pages: int, slots: int = MAX_SLOTS
) -> CudaBackend:
    """An artifact in the CUDA backend over the emulated library; what no token has written yet is NaN."""
    manifest, spec = artifact.manifest, artifact.manifest.model
    cache, weight_format = choose_cache(manifest, kv_cache), DECODE_FORMATS[decode_mode]
    plan = ArenaPlan.of(needed_tensors(manifest, weight_format))
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
    memory = [arena, tensors, pool, *rope]
    return CudaBackend(decoder, allocator, spec, torch.device("cpu"), decode_mode, context, memory)


def aligned(nbytes: int) -> Tensor:
    """Host memory uint8 [nbytes] at a multiple of 256."""
    raw = torch.empty(nbytes + 256, dtype=torch.uint8)
    offset = -raw.data_ptr() % 256
    return raw[offset : offset + nbytes]
