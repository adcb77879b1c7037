"""A model run a layer at a time over windows of tokens: whatever its size, one matrix at a time is dequantised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fut_runtime.artifact.manifest import KVCacheSpec
from fut_runtime.artifact.spec import ModelSpec
from fut_runtime.reference.activation_scale import ActivationScales
from fut_runtime.reference.cache import RequestCache
from fut_runtime.reference.layer import Attend, EightBit, LayerWeights, Sixteen, run_layer
from fut_runtime.reference.model import ReferenceModel
from fut_runtime.reference.numerics import Numerics
from fut_runtime.reference.rotation import sylvester_hadamard
from fut_runtime.rope import rope_tables

#: Bytes of the widest intermediate (gate and up, FP32) of the windows that run together.
_BATCH_BYTES = {"cpu": 1 << 26, "cuda": 1 << 32}

#: The weights of layer `index`. They should be functions that make them, so that the layer is never held as a whole.
MakeLayer = Callable[[int], LayerWeights]


@dataclass(frozen=True)
class StreamedPath:
    """How windows pass through a layer: `ReferenceRunner`'s protocols, for one layer of many windows.

    A layer's cache lives only while the layer runs, for nothing but that layer reads it. The figures are those of a
    whole model that keeps one E4M3 state a window.

    Attributes:
        protocol: `decode`, `prefill` or `serve`, see `runner.PROTOCOLS`.
        prefill, decode: weights of the two paths; a path that the protocol does not take may be None.
        initial_scale: FP32 [layers, 4], the E4M3 scales of the prefill path; None for 16-bit activations.
    """

    spec: ModelSpec
    protocol: str
    numerics: Numerics
    kv_cache: KVCacheSpec
    prefill: MakeLayer | None = None
    decode: MakeLayer | None = None
    initial_scale: Tensor | None = None

    def run_layer(self, index: int, states: Tensor) -> Tensor:
        """Residual stream [windows, tokens, hidden] behind layer `index`, from that before it, on its device.

        Windows do not see each other.
        """
        windows, tokens, _ = states.shape
        model, device = replace(self.spec, num_layers=1), states.device
        signs = sylvester_hadamard(model.rotation_block).to(device)
        caches = [RequestCache(model, self.kv_cache, tokens, signs, self.numerics, device) for _ in range(windows)]
        first = {"prefill": tokens, "decode": 0, "serve": tokens // 2}[self.protocol]
        parts = []
        for path, begin, end in (("prefill", 0, first), ("decode", first, tokens)):
            if begin < end:
                parts.append(self._run_part(index, path, states[:, begin:end], begin, caches))
                for cache in caches:
                    cache.advance(end - begin)
        return torch.cat(parts, dim=1)

    def _run_part(self, index: int, path: str, states: Tensor, begin: int, caches: list[RequestCache]) -> Tensor:
        windows, tokens, _ = states.shape
        make = self.prefill if path == "prefill" else self.decode
        assert make is not None
        products: EightBit | Sixteen = Sixteen(self.numerics, self.spec.rms_norm_eps)
        if path == "prefill" and self.initial_scale is not None:
            initial = self.initial_scale[index : index + 1].to(states.device)
            products = EightBit(ActivationScales(initial, 1.0, frozen=True), 0, self.spec.rms_norm_eps)
        rope = rope_tables(self.spec, torch.arange(begin, begin + tokens, device=states.device))
        rope = (rope[0].repeat(windows, 1), rope[1].repeat(windows, 1))
        h = states.to(self.numerics.dtype).flatten(0, 1)
        out = run_layer(self.spec, make(index), products, self.numerics, h, rope, _attend(caches, path))
        return out.view(windows, tokens, -1)


def _attend(caches: list[RequestCache], path: str) -> Attend:
    """Attention of windows that lie one after another, each over its own cache."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(caches, *(x.chunk(len(caches)) for x in (q, k, v)), strict=True)
        return torch.cat([(c.prefill if path == "prefill" else c.decode)(0, *heads) for c, *heads in parts])

    return attend


def windows_at_once(model: ModelSpec, tokens: int, device: torch.device) -> int:
    """Windows of so many tokens that run through a layer together."""
    return max(1, _BATCH_BYTES[device.type] // (4 * tokens * 2 * model.intermediate_size))


@torch.inference_mode()
def stream(path: StreamedPath, embed: Tensor, windows: Tensor, progress: Callable[[int], None] | None = None) -> Tensor:
    """The residual stream after the last layer, [windows, tokens, hidden] in the compute type on embed's device.

    Args:
        embed: [vocab, hidden].
        windows: int64 [windows, tokens].
        progress: told each layer that is done.
    """
    states = embed[windows.to(embed.device)].to(path.numerics.dtype)
    batch = windows_at_once(path.spec, windows.shape[1], states.device)
    for index in range(path.spec.num_layers):
        for part in states.split(batch):
            part.copy_(path.run_layer(index, part))
        if progress is not None:
            progress(index)
    return states


class FinishedRunner:
    """A `WindowRunner` over the states that `stream` left: its windows must be asked for in their order, once each."""

    def __init__(self, model: ReferenceModel, states: Tensor) -> None:
        self._model = model
        self._states: Iterator[Tensor] = iter(states)

    def hidden(self, tokens: Tensor) -> Tensor:
        return next(self._states)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)
