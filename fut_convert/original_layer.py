"""The checkpoint's own layer beside the quantized one: what each module is to put out, and what its inputs are like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fut_convert.activation_store import ActivationStore
from fut_convert.calibration import Batch, Calibration, LayerStatistics, SiteStatistics
from fut_convert.sixteen_bit import SixteenBitProjection
from fut_runtime.reference.layer import LayerWeights, Sixteen, attention, gated
from fut_runtime.reference.numerics import EXACT


@dataclass(frozen=True, kw_only=True)
class _Watched(SixteenBitProjection):
    """A projection that shows its accumulator."""

    show: Callable[[Tensor], None]

    def accumulate(self, x: Tensor) -> Tensor:
        accumulator = super().accumulate(x)
        self.show(accumulator)
        return accumulator


class OriginalLayer:
    """Runs a layer of the checkpoint over calibration's own hidden states, and every product of it once.

    `qkv`, `o`, `gate_up` and `down` are each called for all batches before the next one. They return what the quantized
    module is to put out before its bias, float32 [tokens, out]; `o` and `down` on top what the residual stream of the
    quantized layers, h [tokens, hidden] where the module's output is added, has lost. After `down` calibration's hidden
    states are those behind the layer, and `statistics` what `Calibration.run_layer` would have returned: the same
    numbers, to the bit.
    """

    def __init__(self, calibration: Calibration, layer: LayerWeights) -> None:
        self._calibration = calibration
        self._seen = SiteStatistics(calibration.lanes, calibration.lane_ends())
        self._accumulator: Tensor | None = None
        self._watched = {
            m: _Watched(p.weight, p.channel_scale, p.gain, p.bias, show=self._take)
            for m, p in layer.projections.items()
        }
        self._layer = replace(layer, projections=self._watched)
        self._products = Sixteen(EXACT, calibration.model.rms_norm_eps, self._seen.observe)

    @cached_property
    def _middle(self) -> ActivationStore:
        """What `o` adds, then the residual stream it was added to. BF16 holds an accumulator as it is."""
        return self._calibration.room("middle", self._calibration.model.hidden_size)

    @cached_property
    def _added(self) -> ActivationStore:
        """What `down` adds."""
        return self._calibration.room("added", self._calibration.model.hidden_size)

    @torch.inference_mode()
    def qkv(self, batch: Batch) -> Tensor:
        model, layer, h = self._calibration.model, self._layer, _load(self._calibration.hidden, batch)
        heads = attention(model, layer, self._products, EXACT, h, batch.rope, batch.attend)
        wanted = self._taken()
        self._products.plain(layer, "o", heads)
        self._middle.store(batch.windows, self._taken())
        return wanted

    @torch.inference_mode()
    def o(self, batch: Batch, h: Tensor) -> Tensor:
        return self._add("o", batch, h, self._calibration.hidden, self._middle, self._middle)

    @torch.inference_mode()
    def gate_up(self, batch: Batch) -> Tensor:
        wide = gated(self._layer, self._products, _load(self._middle, batch))
        wanted = self._taken()
        self._products.plain(self._layer, "down", wide)
        self._added.store(batch.windows, self._taken())
        return wanted

    @torch.inference_mode()
    def down(self, batch: Batch, h: Tensor) -> Tensor:
        return self._add("down", batch, h, self._middle, self._added, self._calibration.hidden)

    def statistics(self) -> LayerStatistics:
        """What the projections saw; gives the room of the layer's activations and weights back."""
        self._middle.close()
        self._added.close()
        # They refer to this object: left to the garbage collector, a layer would live beside the next one.
        self._watched.clear()
        return self._seen.result(self._calibration.count * self._calibration.tokens)

    def _add(
        self, module: str, batch: Batch, h: Tensor, stream: ActivationStore, out: ActivationStore, to: ActivationStore
    ) -> Tensor:
        """Add what a module puts out to the residual stream, and what makes good for h on top: see the class."""
        own, added = _load(stream, batch), _load(out, batch)
        to.store(batch.windows, own + self._layer.projections[module].finish(added))
        return added + own - h

    def _take(self, accumulator: Tensor) -> None:
        self._accumulator = accumulator

    def _taken(self) -> Tensor:
        """The accumulator of the projection that ran last, which is let go."""
        accumulator, self._accumulator = self._accumulator, None
        assert accumulator is not None
        return accumulator


def _load(store: ActivationStore, batch: Batch) -> Tensor:
    """Activations of a batch, float32 [tokens, channels]."""
    return store.load(batch.windows).flatten(0, 1).float()
