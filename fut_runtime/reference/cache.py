"""What one request keeps between calls: BF16 history while it is prefilled, and the decode cache."""

from __future__ import annotations

import torch
from torch import Tensor

from fut_runtime.artifact.manifest import KVCacheSpec
from fut_runtime.artifact.spec import ModelSpec
from fut_runtime.errors import FutError
from fut_runtime.reference.attention import attend, attend_quantized
from fut_runtime.reference.kv_quant import QuantizedHeads, quantize_heads
from fut_runtime.reference.numerics import Numerics
from fut_runtime.reference.rotation import rotate


class RequestCache:
    """Keys and values of one request, preallocated for `capacity` tokens.

    Prefill attends over 16-bit history and writes the decode copy in the same pass; the history is freed at the
    first decode step. A prompt that continues after decoding (a chat's next turn) attends over history rebuilt from
    the decode cache. With a BF16 decode cache (`spec.bits` 16) history and decode cache are one.
    """

    def __init__(
        self,
        model: ModelSpec,
        spec: KVCacheSpec,
        capacity: int,
        signs: Tensor,
        numerics: Numerics,
        device: torch.device,
    ) -> None:
        self.model, self.spec, self.capacity, self.signs, self.numerics = model, spec, capacity, signs, numerics
        self.device = device
        self.length = 0
        self._history: list[tuple[Tensor, Tensor]] | None = None
        self._codes: list[tuple[QuantizedHeads, QuantizedHeads]] = []
        if spec.bits == 4:
            self._codes = [(self._empty_codes(), self._empty_codes()) for _ in range(model.num_layers)]
        else:
            self._history = self._empty_history()

    def reserve(self, tokens: int) -> None:
        """Check that `tokens` more fit. Raises FutError naming the capacity."""
        if self.length + tokens > self.capacity:
            raise FutError(
                f"request holds {self.length} tokens and would need {self.length + tokens}, but was opened for "
                f"{self.capacity}: open it with a larger capacity"
            )

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write K and V of the tokens that follow and attend over the 16-bit history."""
        if self._history is None:
            self._history = self._rebuilt_history() if self.length else self._empty_history()
        q, k, v = (self.numerics.round16(t) for t in (q, k, v))
        keys, values = self._history[layer]
        end = self.length + k.shape[0]
        keys[self.length : end], values[self.length : end] = k, v
        if self.spec.bits == 4:
            self._write_codes(layer, k, v)
        return attend(q, keys[:end], values[:end], self.numerics)

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write K and V of the tokens that follow and attend over the decode cache, the current tokens included."""
        if self.spec.bits != 4:
            return self.prefill(layer, q, k, v)
        self._history = None
        self._write_codes(layer, self.numerics.round16(k), self.numerics.round16(v))
        keys, values = self._codes[layer]
        end = self.length + k.shape[0]
        return attend_quantized(q, keys.tokens(end), values.tokens(end), self.spec, self.signs, self.numerics)

    def advance(self, tokens: int) -> None:
        """Count tokens that every layer has written."""
        self.length += tokens

    def rewind(self, length: int) -> None:
        """Forget all tokens but the first `length`; what follows is written over them."""
        if not 0 <= length <= self.length:
            raise FutError(f"a cache of {self.length} tokens cannot be rewound to {length}")
        self.length = length

    def codes(self, layer: int) -> tuple[QuantizedHeads, QuantizedHeads]:
        """Quantised K and V of a layer, the first `length` tokens."""
        keys, values = self._codes[layer]
        return keys.tokens(self.length), values.tokens(self.length)

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer's first `length` tokens as the decode cache holds them: codes, or 16-bit numbers."""
        if self.spec.bits == 4:
            keys, values = self.codes(layer)
            return keys.codes, values.codes
        if self._history is None:
            self._history = self._empty_history()
        history_keys, history_values = self._history[layer]
        return history_keys[: self.length], history_values[: self.length]

    def _write_codes(self, layer: int, k: Tensor, v: Tensor) -> None:
        span = slice(self.length, self.length + k.shape[0])
        for cache, x, rotated in zip(self._codes[layer], (k, v), (False, self.spec.v_folded), strict=True):
            new = quantize_heads(x, self.spec, self.signs, rotated=rotated)
            cache.codes[span], cache.scale[span], cache.zero[span] = new.codes, new.scale, new.zero

    def _empty_codes(self) -> QuantizedHeads:
        shape = (self.capacity, self.model.num_kv_heads)
        return QuantizedHeads(
            torch.zeros(*shape, self.model.head_dim, dtype=torch.uint8, device=self.device),
            torch.zeros(shape, dtype=torch.bfloat16, device=self.device),
            torch.zeros(shape, dtype=torch.bfloat16, device=self.device),
        )

    def _empty_history(self) -> list[tuple[Tensor, Tensor]]:
        shape = (self.capacity, self.model.num_kv_heads, self.model.head_dim)
        # Values that round16 produced are exact in 16 bits; without rounding they need the compute type.
        dtype = torch.bfloat16 if self.numerics.round_activations else self.numerics.dtype
        return [
            (torch.zeros(shape, dtype=dtype, device=self.device), torch.zeros(shape, dtype=dtype, device=self.device))
            for _ in range(self.model.num_layers)
        ]

    def _rebuilt_history(self) -> list[tuple[Tensor, Tensor]]:
        history = self._empty_history()
        for layer, stores in enumerate(history):
            turned = (self.spec.rotation, self.spec.rotates_v)
            for cache, store, rotated in zip(self.codes(layer), stores, turned, strict=True):
                x = cache.dequantized(self.numerics.dtype)
                store[: self.length] = rotate(x, self.signs) if rotated else x
        return history
