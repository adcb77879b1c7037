"""Calibration: what each projection's input looks like, a layer at a time.

The checkpoint's own layers run in 16 bits (BF16 products, FP32 elsewhere) over the calibration windows. Hidden states
are carried from layer to layer, so each layer's weights are needed once, together with their quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from fut_convert.activation_store import ActivationStore
from fut_convert.sixteen_bit import SixteenBitProjection, causal_attention
from fut_runtime.artifact.layout import SITES
from fut_runtime.artifact.spec import MODULES, ModelSpec
from fut_runtime.reference.layer import Attend, LayerWeights, Sixteen, run_layer
from fut_runtime.reference.numerics import EXACT, row_factor
from fut_runtime.rope import rope_tables

#: Bytes of the widest intermediate (gate and up, FP32) of the windows that run together. What is larger than 32 MB
#: malloc takes from the system anew each time, and fresh pages cost more than what is computed in them.
_BATCH_BYTES = {"cpu": 1 << 25, "cuda": 1 << 30}

#: What `uncalibrated_scales` allows for: doublings of the residual stream's maximum a block (attention or MLP) and in
#: all, and fixed E4M3 scales of the attention's output and of silu(gate)·up.
_DOUBLINGS_PER_BLOCK = 5
_MOST_DOUBLINGS = 15
_ATTENTION_SCALE = 0.25
_MLP_SCALE = 8.0


def windows_at_once(model: ModelSpec, tokens: int, device: torch.device) -> int:
    """Windows of so many tokens that run through a layer together."""
    return max(1, _BATCH_BYTES[device.type] // (4 * tokens * 2 * model.intermediate_size))


@dataclass
class LayerStatistics:
    """Of one layer: FP64 [in] mean squares of each module's input before the gain, and absolute maxima of the sites."""

    second_moment: dict[str, Tensor] = field(default_factory=dict)
    amax: dict[str, float] = field(default_factory=dict)

    def activation_scale(self, margin: float) -> Tensor:
        """Initial E4M3 scales FP32 [4]: margin · amax / 448, or 1 where a site was always zero."""
        values = [self.amax[site] for site in SITES]
        return torch.tensor([margin * v / 448 if v > 0 else 1.0 for v in values], dtype=torch.float32)


class SiteStatistics:
    """Adds up what the projections of a layer see, a batch after another."""

    def __init__(self, device: torch.device) -> None:
        self._sums = {m: torch.zeros((), dtype=torch.float64, device=device) for m in MODULES}
        self._maxima = {m: torch.zeros((), device=device) for m in MODULES}

    def observe(self, site: str, product_input: Tensor, stored: Tensor) -> None:
        """An observer of `Sixteen`."""
        # A sum over some thousand tokens in FP32 is exact enough; sums over the whole text need more.
        self._sums[site] = self._sums[site] + product_input.square().sum(dim=0).double()
        self._maxima[site] = torch.maximum(self._maxima[site], torch.maximum(stored.amax(), -stored.amin()))

    def result(self, tokens: int) -> LayerStatistics:
        """The statistics over so many tokens in all."""
        means = {m: s / tokens for m, s in self._sums.items()}
        return LayerStatistics(means, {m: v.item() for m, v in self._maxima.items()})


#: room(name, shape) -> where activations of this shape are kept, under a name that is not in use.
Room = Callable[[str, tuple[int, int, int]], ActivationStore]


@dataclass(frozen=True)
class Batch:
    """Windows that run together.

    Attributes:
        windows: which.
        states: their hidden states BF16 [tokens, hidden], maybe a view: what changes them is `Calibration.advance`.
        rope: cosines and sines of their positions.
        attend: causal attention inside each window.
    """

    windows: slice
    states: Tensor
    rope: tuple[Tensor, Tensor]
    attend: Attend


class Calibration:
    """Hidden states of all windows, advanced one layer at a time.

    Attributes:
        hidden: the hidden states [windows, tokens, hidden].
    """

    def __init__(
        self,
        model: ModelSpec,
        windows: Tensor,
        embed: Tensor | None,
        device: torch.device,
        room: Room | None = None,
    ) -> None:
        """Begin before the first layer.

        Args:
            windows: int64 [windows, tokens].
            embed: [vocab, hidden], the checkpoint's; None where the hidden states are to be restored.
            device: where the layers run.
            room: gives the room that activations take; by default on the device.
        """
        self.model = model
        self.device = device
        self.count, self.tokens = windows.shape
        self._room = room or (lambda _, shape: ActivationStore(shape, device))
        self.hidden = self.room("hidden", model.hidden_size)
        self._rope = rope_tables(model, torch.arange(self.tokens, device=device))
        self._batch = windows_at_once(model, self.tokens, device)
        if embed is not None:
            for part in self._slices():
                self.hidden.store(part, embed[windows[part]])

    @torch.inference_mode()
    def run_layer(self, layer: LayerWeights) -> LayerStatistics:
        """Advance every window through a layer and return what its projections saw."""
        seen = SiteStatistics(self.device)
        products = Sixteen(EXACT, self.model.rms_norm_eps, seen.observe)
        for batch in self.batches():
            h = batch.states.float()
            self.advance(batch, run_layer(self.model, layer, products, EXACT, h, batch.rope, batch.attend))
        return seen.result(self.count * self.tokens)

    @torch.inference_mode()
    def head_second_moment(self) -> Tensor:
        """FP64 [hidden], mean square of the final norm's output before its gain; call it after the last layer."""
        total = torch.zeros(self.model.hidden_size, dtype=torch.float64, device=self.device)
        for window in range(self.count):
            h = self.hidden.load(slice(window, window + 1))[0].float()
            total += (h * row_factor(h, self.model.rms_norm_eps)).square().sum(dim=0).double()
        return total / (self.count * self.tokens)

    def batches(self) -> Iterator[Batch]:
        """All windows, as many at a time as run together."""
        for windows in self._slices():
            count = windows.stop - windows.start
            rope = (self._rope[0].repeat(count, 1), self._rope[1].repeat(count, 1))
            yield Batch(
                windows, self.hidden.load(windows).flatten(0, 1), rope, partial(causal_attention, windows=count)
            )

    def room(self, name: str, channels: int) -> ActivationStore:
        """Room for activations of all windows, not in use under this name yet."""
        return self._room(name, (self.count, self.tokens, channels))

    def advance(self, batch: Batch, states: Tensor) -> None:
        """Replace the hidden states of a batch, by [tokens, hidden]."""
        self.hidden.store(batch.windows, states)

    def _slices(self) -> Iterator[slice]:
        for first in range(0, self.count, self._batch):
            yield slice(first, min(first + self._batch, self.count))


def calibration_layer(
    weights: Mapping[str, Tensor],
    gains: Mapping[str, Tensor],
    biases: Mapping[str, Tensor],
    head_norms: tuple[Tensor, Tensor] | None,
    device: torch.device,
) -> LayerWeights:
    """A layer of the checkpoint for `Calibration.run_layer`, from tensors that quantization will read as well."""
    projections = {
        module: SixteenBitProjection(
            weight.to(device, torch.bfloat16),
            gain=gains[module].to(device) if module in gains else None,
            bias=biases[module].to(device) if module in biases else None,
        )
        for module, weight in weights.items()
    }
    q_norm, k_norm = (None, None) if head_norms is None else (n.to(device) for n in head_norms)
    return LayerWeights(projections, q_norm=q_norm, k_norm=k_norm)


def uncalibrated_scales(model: ModelSpec, embed_amax: float, margin: float) -> Tensor:
    """Initial E4M3 scales FP32 [layers, 4] without calibration: room for large activations, at a cost in precision.

    The first site reads the embedding, whose absolute maximum is `embed_amax`; from there the residual stream may grow
    block by block. Room for massive activations where none can be yet would drown the small values of the first blocks.
    `docs/convert.md` argues the constants.
    """
    largest = max(embed_amax, 1e-6)
    scales = torch.empty(model.num_layers, len(SITES), dtype=torch.float32)
    for layer in range(model.num_layers):
        attention, mlp = (2.0 ** min(_DOUBLINGS_PER_BLOCK * (2 * layer + i), _MOST_DOUBLINGS) for i in range(2))
        scales[layer] = torch.tensor([largest * attention / 448, _ATTENTION_SCALE, largest * mlp / 448, _MLP_SCALE])
    scales[0, 0] = margin * largest / 448
    return scales
