"""A model on the card as the benchmark of prompts needs it: random weights, caches, and prefills of several depths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fut_runtime.artifact.manifest import KVCacheSpec, Manifest
from fut_runtime.bench.random_tensors import fill_weights
from fut_runtime.bench.shapes import with_layers
from fut_runtime.cuda.activations import ActivationState
from fut_runtime.cuda.arena import ArenaPlan
from fut_runtime.cuda.decoder import Decoder
from fut_runtime.cuda.device_memory import allocate
from fut_runtime.cuda.library import library
from fut_runtime.cuda.memory_plan import MAX_SLOTS, decoder_config, page_bytes
from fut_runtime.cuda.pages import pages_for
from fut_runtime.cuda.prefill import Chunk, Prefill
from fut_runtime.cuda.prefill_plan import history_page_bytes, prefill_config, prefill_workspace_bytes
from fut_runtime.cuda.prefill_weights import PREFILL_FORMATS, prefill_layers
from fut_runtime.cuda.tensors import DeviceTensors, needed_tensors
from fut_runtime.rope import rope_tables

_SEED = 1
#: Requests of a run at most; each may begin a page that it does not fill.
_MOST_REQUESTS = 16
#: Initial scale of every site: random weights keep activations of about one, with a few of a hundred.
_SCALE = 0.25


@dataclass
class DeepPrefill:
    """A prefill over some layers, and the decoder that it shares a cache with."""

    prefill: Prefill
    decoder: Decoder
    vocab: int

    def chunks(self, lengths: Sequence[int]) -> list[Chunk]:
        """Whole prompts of random tokens, one a slot, with pages of their own."""
        generator = torch.Generator().manual_seed(_SEED)
        chunks, taken = [], 0
        for slot, length in enumerate(lengths):
            pages = range(taken, taken + pages_for(length))
            taken = pages.stop
            self.decoder.set_pages(slot, pages)
            self.prefill.set_pages(slot, pages)
            chunks.append(Chunk(slot, 0, torch.randint(self.vocab, (length,), generator=generator).tolist()))
        return chunks

    def run(self, chunks: Sequence[Chunk], logits: Tensor | None = None) -> None:
        """One call: all layers, and the head of the last tokens where there is a place for their logits."""
        heads = range(len(chunks)) if logits is not None else ()
        self.prefill.run(chunks, ended=[chunk.slot for chunk in chunks], heads=heads, logits=logits)


class BenchPrompts:
    """Random weights of one format for prefill and decoding, and pages for `tokens` tokens.

    Attributes:
        manifest: of the model.
        mode: `e4m3` or `bf16`.
    """

    def __init__(self, manifest: Manifest, mode: str, *, tokens: int, context: int, device: torch.device) -> None:
        """Take the memory and fill it.

        Args:
            tokens: most of a run.
            context: most of a request.

        Raises:
            DeviceMemoryError: the card has too little; fewer layers or tokens need less.
        """
        self.manifest, self.mode = manifest, mode
        self._device, self._rows, self._context = device, tokens, context
        self._cache = KVCacheSpec()
        self._pages = pages_for(tokens) + _MOST_REQUESTS
        generator = torch.Generator(device).manual_seed(_SEED)
        plan = ArenaPlan.of(needed_tensors(manifest, PREFILL_FORMATS[mode]))
        arena = allocate(plan.nbytes, device, f"the {mode} weights of {manifest.model.num_layers} layers")
        self._tensors = plan.views(arena)
        self._tensors["embed"][manifest.model.vocab_size :].zero_()
        fill_weights(self._tensors, manifest, generator)
        self._rope = [t.contiguous().to(device) for t in rope_tables(manifest.model, torch.arange(context))]
        size = self._pages * page_bytes(manifest.model, self._cache)
        self._pool = allocate(size, device, "the decode cache", zero=True)
        size = self._pages * history_page_bytes(manifest.model)
        self._history = allocate(size, device, "the history")

    @contextmanager
    def deep(self, layers: int) -> Iterator[DeepPrefill]:
        """A prefill over the first `layers` layers; memory is shared with the others."""
        manifest = with_layers(self.manifest, layers)
        tensors = DeviceTensors(manifest, PREFILL_FORMATS[self.mode], self._tensors)
        config = decoder_config(
            tensors,
            self._cache,
            context_tokens=self._context,
            pages=self._pages,
            embed=self._tensors["embed"].data_ptr(),
            rope=(self._rope[0].data_ptr(), self._rope[1].data_ptr()),
            pool=self._pool.data_ptr(),
        )
        decoder = Decoder(library(), config, self._device, f"benchmark of {layers} layers")
        structs, made = prefill_layers(tensors)
        initial = torch.full((layers, 4), _SCALE, device=self._device)
        activations = ActivationState(initial, 1.0, "delayed", MAX_SLOTS) if self.mode == "e4m3" else None
        prompts = prefill_config(
            self.mode,
            structs,
            config,
            history_pages=self._pages,
            rows=self._rows,
            scale_mode="delayed",
            history=self._history.data_ptr(),
            activations=activations,
        )
        workspace = allocate(prefill_workspace_bytes(prompts, config), self._device, "runs of prompts", zero=True)
        prompts.workspace, prompts.workspace_bytes = workspace.data_ptr(), workspace.numel()
        prefill = Prefill(prompts, decoder)
        try:
            yield DeepPrefill(prefill, decoder, manifest.model.vocab_size)
        finally:
            decoder.close()
            prefill.close()
            del workspace, made

    def release(self) -> None:
        """Give the memory back."""
        self._tensors, self._rope = {}, []
        self._pool = self._history = Tensor()
        torch.cuda.empty_cache()
