"""A whole model in the reference arithmetic: embedding, layers, final norm and head, one request at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fut_runtime.artifact.manifest import KVCacheSpec
from fut_runtime.artifact.spec import ModelSpec
from fut_runtime.errors import FutError
from fut_runtime.reference.activation_scale import ActivationScales
from fut_runtime.reference.cache import RequestCache
from fut_runtime.reference.layer import EightBit, LayerWeights, Sixteen, run_layer
from fut_runtime.reference.numerics import Numerics, row_factor
from fut_runtime.reference.projection import Projection, normalized
from fut_runtime.reference.rotation import sylvester_hadamard
from fut_runtime.rope import rope_tables


@dataclass(frozen=True)
class ReferenceModel:
    """Weights of both paths and the arithmetic that runs them.

    Attributes:
        embed: [vocab, hidden], 16-bit.
        prefill, decode: layers of the two paths; the same objects where both use the same weights.
        head: projection of the final norm's output to logits.
        eight_bit: the prefill path quantises activations to E4M3.
        planned_tokens: longest context, where a dynamic RoPE fixes its base.
    """

    spec: ModelSpec
    embed: Tensor
    prefill: Sequence[LayerWeights]
    decode: Sequence[LayerWeights]
    head: Projection
    kv_cache: KVCacheSpec
    numerics: Numerics
    eight_bit: bool = False
    planned_tokens: int | None = None

    @property
    def device(self) -> torch.device:
        """Device that holds the weights."""
        return self.embed.device

    def new_cache(self, capacity: int) -> RequestCache:
        """Empty cache of one request, for `capacity` tokens."""
        signs = sylvester_hadamard(self.spec.rotation_block).to(self.device)
        return RequestCache(self.spec, self.kv_cache, capacity, signs, self.numerics, self.device)

    def forward(
        self, cache: RequestCache, tokens: Sequence[int] | Tensor, path: str, scales: ActivationScales | None = None
    ) -> Tensor:
        """Run the tokens that follow those in the cache; returns the residual stream [tokens, hidden] after all layers.

        `path` is `prefill` or `decode`. Several tokens on the decode path give what one token a call gives, up to the
        order of FP32 sums: every token's K and V are quantised before any query reads them. `scales` is the E4M3 state
        that an eight-bit prefill needs; it records the maxima, and the caller ends the call with its `next_call`.

        Raises:
            FutError: a token id outside the vocabulary, or more tokens than the cache has room for.
        """
        ids = torch.as_tensor(tokens, dtype=torch.int64, device=self.device)
        if ids.numel() == 0:
            raise FutError("a forward pass needs at least one token")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.spec.vocab_size:
            raise FutError(f"token id {low if low < 0 else high} is outside the vocabulary of {self.spec.vocab_size}")
        cache.reserve(ids.numel())
        positions = torch.arange(cache.length, cache.length + ids.numel(), device=self.device)
        rope = rope_tables(self.spec, positions, self.planned_tokens)
        h = self.embed[ids].to(self.numerics.dtype)
        for index in range(self.spec.num_layers):
            h = self.forward_layer(cache, index, h, rope, path, scales)
        cache.advance(ids.numel())
        return h

    def forward_layer(
        self,
        cache: RequestCache,
        index: int,
        h: Tensor,
        rope: tuple[Tensor, Tensor],
        path: str,
        scales: ActivationScales | None = None,
    ) -> Tensor:
        """Run one layer over the tokens that follow those in the cache, without counting them: see `forward`."""
        prefill = path == "prefill"
        products: EightBit | Sixteen
        if prefill and self.eight_bit:
            if scales is None:
                raise FutError("E4M3 prefill needs the state of its activation scales")
            products = EightBit(scales, index, self.spec.rms_norm_eps)
        else:
            products = Sixteen(self.numerics, self.spec.rms_norm_eps)
        layer = (self.prefill if prefill else self.decode)[index]
        attend_to = partial(cache.prefill if prefill else cache.decode, index)
        return run_layer(self.spec, layer, products, self.numerics, h, rope, attend_to)

    def logits(self, h: Tensor) -> Tensor:
        """Logits [tokens, vocab] in the compute type from the residual stream [tokens, hidden]."""
        x = normalized(h, row_factor(h, self.spec.rms_norm_eps), self.head.gain)
        return self.head(self.numerics.round16(x))
