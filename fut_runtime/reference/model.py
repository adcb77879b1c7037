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
from fut_runtime.reference.layer import Attend, EightBit, LayerWeights, Sixteen, run_layer
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
        ids = self._checked_ids(tokens)
        cache.reserve(ids.numel())
        positions = torch.arange(cache.length, cache.length + ids.numel(), device=self.device)
        rope = rope_tables(self.spec, positions, self.planned_tokens)
        h = self.embed[ids].to(self.numerics.dtype)
        for index in range(self.spec.num_layers):
            h = self.forward_layer(cache, index, h, rope, path, scales)
        cache.advance(ids.numel())
        return h

    def forward_branches(
        self, cache: RequestCache, branches: Sequence[Sequence[int]], path: str, scales: ActivationScales | None = None
    ) -> Tensor:
        """Run several continuations of the tokens in the cache side by side, and leave the cache as it was.

        Every branch follows the cached tokens and sees nothing of the others, so its rows are what `forward` would
        give for it alone, up to the order of FP32 sums. Arguments and errors as for `forward`.

        Returns:
            [tokens of all branches, hidden], branch after branch.
        """
        ids = self._checked_ids([token for branch in branches for token in branch])
        cache.reserve(max(map(len, branches)))
        positions = torch.cat([torch.arange(len(branch), device=self.device) for branch in branches]) + cache.length
        rope = rope_tables(self.spec, positions, self.planned_tokens)
        h = self.embed[ids].to(self.numerics.dtype)
        lengths = [len(branch) for branch in branches]
        for index in range(self.spec.num_layers):
            h = self.forward_layer(cache, index, h, rope, path, scales, lengths)
        return h

    def _checked_ids(self, tokens: Sequence[int] | Tensor) -> Tensor:
        ids = torch.as_tensor(tokens, dtype=torch.int64, device=self.device)
        if ids.numel() == 0:
            raise FutError("a forward pass needs at least one token")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.spec.vocab_size:
            raise FutError(f"token id {low if low < 0 else high} is outside the vocabulary of {self.spec.vocab_size}")
        return ids

    def forward_layer(
        self,
        cache: RequestCache,
        index: int,
        h: Tensor,
        rope: tuple[Tensor, Tensor],
        path: str,
        scales: ActivationScales | None = None,
        branches: Sequence[int] | None = None,
    ) -> Tensor:
        """Run one layer over the tokens that follow those in the cache, without counting them: see `forward`.

        `branches` are the lengths of the continuations that the tokens belong to: see `forward_branches`.
        """
        prefill = path == "prefill"
        products: EightBit | Sixteen
        if prefill and self.eight_bit:
            if scales is None:
                raise FutError("E4M3 prefill needs the state of its activation scales")
            products = EightBit(scales, index, self.spec.rms_norm_eps)
        else:
            products = Sixteen(self.numerics, self.spec.rms_norm_eps)
        layer = (self.prefill if prefill else self.decode)[index]
        attend_to: Attend = partial(cache.prefill if prefill else cache.decode, index)
        if branches is not None:
            attend_to = _branch_by_branch(attend_to, branches)
        return run_layer(self.spec, layer, products, self.numerics, h, rope, attend_to)

    def logits(self, h: Tensor) -> Tensor:
        """Logits [tokens, vocab] in the compute type from the residual stream [tokens, hidden]."""
        x = normalized(h, row_factor(h, self.spec.rms_norm_eps), self.head.gain)
        return self.head(self.numerics.round16(x))


def _branch_by_branch(attend_to: Attend, lengths: Sequence[int]) -> Attend:
    """Attention of continuations that share a cache: each writes its keys and values over those of the one before."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(t.split(list(lengths)) for t in (q, k, v)), strict=True)
        return torch.cat([attend_to(*part) for part in parts])

    return attend
