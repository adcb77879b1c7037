"""A model on the card as the benchmark needs it: weights, a cache that is already full, and decoders over both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fut_runtime.artifact.manifest import KVCacheSpec, Manifest
from fut_runtime.artifact.reader import Artifact
from fut_runtime.bench.random_tensors import fill_cache, fill_weights
from fut_runtime.bench.shapes import with_layers
from fut_runtime.cuda.arena import ArenaPlan, fill
from fut_runtime.cuda.decoder import Decoder
from fut_runtime.cuda.device_memory import allocate
from fut_runtime.cuda.library import library
from fut_runtime.cuda.memory_plan import MAX_ROWS, decoder_config, page_bytes
from fut_runtime.cuda.pages import pages_for
from fut_runtime.cuda.structs import PAGE_TOKENS
from fut_runtime.cuda.tensors import DeviceTensors, needed_tensors
from fut_runtime.errors import FutError
from fut_runtime.rope import rope_tables

_SEED = 1


@dataclass(frozen=True)
class StepBytes:
    """What a step cannot do without reading, in bytes: weights with their scales, head included, and the cache."""

    weights: int
    cache: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache


def step_bytes(manifest: Manifest, weight_format: str, cache: KVCacheSpec, batch: int, context: int) -> StepBytes:
    """Bytes that one step of `batch` requests with `context` tokens each must read; of the embedding a row each."""
    model = manifest.model
    weights = sum(spec.nbytes for spec in needed_tensors(manifest, weight_format) if spec.name != "embed")
    weights += 2 * model.hidden_size * (batch if "head" in manifest.weights else model.vocab_size)
    return StepBytes(weights, batch * context * page_bytes(model, cache) // PAGE_TOKENS)


class BenchModel:
    """Weights and a cache of random contents for up to `batch` requests of up to `context` tokens.

    Attributes:
        manifest, weight_format, cache: what is on the card.
    """

    def __init__(
        self,
        manifest: Manifest,
        weight_format: str,
        cache: KVCacheSpec,
        *,
        batch: int,
        context: int,
        device: torch.device,
        artifact: Artifact | None = None,
    ) -> None:
        """Take the memory and fill it.

        Args:
            artifact: where the weights come from; None makes random ones.

        Raises:
            DeviceMemoryError: the card has too little; fewer layers, requests or tokens need less.
            FutError: more requests than a step has rows, or more tokens than the model has positions.
        """
        model = manifest.model
        if not 1 <= batch <= MAX_ROWS:
            raise FutError(f"a batch of {batch} requests, expected 1 to {MAX_ROWS}: the rows of a step")
        if not 1 <= context <= model.max_position_embeddings:
            raise FutError(f"a context of {context} tokens, expected 1 to {model.max_position_embeddings}")
        self.manifest, self.weight_format, self.cache = manifest, weight_format, cache
        self._device, self._context = device, context
        self._pages = batch * pages_for(context)
        generator = torch.Generator(device).manual_seed(_SEED)
        plan = ArenaPlan.of(needed_tensors(manifest, weight_format))
        arena = allocate(plan.nbytes, device, f"the {weight_format} weights of {model.num_layers} layers")
        self._tensors = plan.views(arena)
        self._tensors["embed"][model.vocab_size :].zero_()
        if artifact is None:
            fill_weights(self._tensors, manifest, generator)
        else:
            fill(arena, plan.pieces(artifact))
        self._rope = [t.contiguous().to(device) for t in rope_tables(model, torch.arange(context))]
        self._pool = allocate(self._pages * page_bytes(model, cache), device, f"the cache of {self._pages} pages")
        fill_cache(self._pool, generator)

    @contextmanager
    def decoder(self, layers: int) -> Iterator[Decoder]:
        """A decoder over the first `layers` layers; memory is shared with the others."""
        manifest = with_layers(self.manifest, layers)
        config = decoder_config(
            DeviceTensors(manifest, self.weight_format, self._tensors),
            self.cache,
            context_tokens=self._context,
            pages=self._pages,
            embed=self._tensors["embed"].data_ptr(),
            rope=(self._rope[0].data_ptr(), self._rope[1].data_ptr()),
            pool=self._pool.data_ptr(),
        )
        decoder = Decoder(library(), config, self._device, f"benchmark of {layers} layers")
        try:
            yield decoder
        finally:
            decoder.close()

    def slot_pages(self, slot: int, context: int) -> Sequence[int]:
        """Pages of a request of `context` tokens: far apart, as they are after requests have come and gone."""
        count = pages_for(context)
        step = self._stride()
        return [(slot * count + i) * step % self._pages for i in range(count)]

    def release(self) -> None:
        """Give the memory back."""
        self._tensors = {}
        self._rope, self._pool = [], Tensor()
        torch.cuda.empty_cache()

    def _stride(self) -> int:
        """A step through the pages that meets each of them: prime, and no divisor of their number."""
        return next(p for p in (97, 89, 83, 79, 73) if self._pages % p)
