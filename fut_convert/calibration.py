"""Calibration: what each projection's input looks like, a layer at a time.

The checkpoint's own layers run in 16 bits (BF16 products, FP32 elsewhere) over the calibration windows. Hidden states
are carried from layer to layer, so each layer's weights are needed once, together with their quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from fut_convert.activation_store import ActivationStore
from fut_convert.lanes import Lanes
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
    """Adds up what the projections of a layer see, each of all batches in their order."""

    def __init__(self, lanes: Lanes, lane_ends: Iterable[bool]) -> None:
        """For the batches of a process, of each of which it is known whether a lane ends with it."""
        self._lanes = lanes
        self._ends = list(lane_ends)
        self._seen = dict.fromkeys(MODULES, 0)
        self._sums: dict[str, list[Tensor]] = {m: [] for m in MODULES}
        self._maxima: dict[str, Tensor] = {}

    def observe(self, site: str, product_input: Tensor, stored: Tensor) -> None:
        """An observer of `Sixteen`."""
        # A sum over some thousand tokens in FP32 is exact enough; sums over the whole text need more.
        part, sums, batch = product_input.square().sum(dim=0).double(), self._sums[site], self._seen[site]
        if batch == 0 or self._ends[batch - 1]:
            sums.append(part)
        else:
            sums[-1] += part
        self._seen[site] += 1
        largest = torch.maximum(stored.amax(), -stored.amin())
        self._maxima[site] = torch.maximum(self._maxima[site], largest) if site in self._maxima else largest

    @torch.inference_mode()
    def result(self, tokens: int) -> LayerStatistics:
        """The statistics over so many tokens in all; in the first process only."""
        totals = self._lanes.total(zip(*(self._sums[m] for m in MODULES), strict=True))
        largest = self._lanes.largest(torch.stack([self._maxima[m].float() for m in MODULES]))
        moments = {m: s / tokens for m, s in zip(MODULES, totals, strict=False)}
        return LayerStatistics(moments, dict(zip(MODULES, largest.tolist(), strict=True)))


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
        lanes: Lanes | None = None,
    ) -> None:
        """Begin before the first layer.

        Args:
            windows: int64 [windows, tokens], all of them.
            embed: [vocab, hidden], the checkpoint's; None where the hidden states are to be restored.
            device: where the layers run.
            room: gives the room that activations take; by default on the device.
            lanes: which of the windows this process runs, where several share them. Only the first gets statistics.
        """
        self.model = model
        self.device = device
        self.count, self.tokens = windows.shape
        self.lanes = lanes or Lanes(self.count)
        self._room = room or (lambda _, shape: ActivationStore(shape, device))
        self.hidden = self.room("hidden", model.hidden_size)
        self._rope = rope_tables(model, torch.arange(self.tokens, device=device))
        self._batch = windows_at_once(model, self.tokens, device)
        if embed is not None:
            windows = self.lanes.windows(windows)
            for part in self._slices():
                self.hidden.store(part, embed[windows[part]])

    @torch.inference_mode()
    def run_layer(self, layer: LayerWeights) -> LayerStatistics:
        """Advance every window through a layer and return what its projections saw."""
        seen = SiteStatistics(self.lanes, self.lane_ends())
        products = Sixteen(EXACT, self.model.rms_norm_eps, seen.observe)
        for batch in self.batches():
            h = batch.states.float()
            self.advance(batch, run_layer(self.model, layer, products, EXACT, h, batch.rope, batch.attend))
        return seen.result(self.count * self.tokens)

    @torch.inference_mode()
    def head_second_moment(self) -> Tensor:
        """FP64 [hidden], mean square of the final norm's output before its gain; call it after the last layer."""

        def lane_sums() -> Iterator[Sequence[Tensor]]:
            for lane in self.lanes.own:
                total = torch.zeros(self.model.hidden_size, dtype=torch.float64, device=self.device)
                for window in range(lane.start, lane.stop):
                    h = self.hidden.load(slice(window, window + 1))[0].float()
                    total += (h * row_factor(h, self.model.rms_norm_eps)).square().sum(dim=0).double()
                yield [total]

        totals = self.lanes.total(lane_sums())
        return totals[0] / (self.count * self.tokens) if totals else torch.empty(0)

    def batches(self) -> Iterator[Batch]:
        """This process's windows, as many at a time as run together."""
        for windows in self._slices():
            count = windows.stop - windows.start
            rope = (self._rope[0].repeat(count, 1), self._rope[1].repeat(count, 1))
            yield Batch(
                windows, self.hidden.load(windows).flatten(0, 1), rope, partial(causal_attention, windows=count)
            )

    def room(self, name: str, channels: int) -> ActivationStore:
        """Room for activations of this process's windows, not in use under this name yet."""
        return self._room(name, (self.lanes.count, self.tokens, channels))

    def advance(self, batch: Batch, states: Tensor) -> None:
        """Replace the hidden states of a batch, by [tokens, hidden]."""
        self.hidden.store(batch.windows, states)

    def spoilt(self) -> str:
        """Where this process's hidden states stop being finite, for a message; empty where they do not."""
        for window in range(self.lanes.count):
            bad = ~self.hidden.load(slice(window, window + 1))[0].isfinite().all(dim=-1)
            if bool(bad.any()):
                number, token = self.lanes.among_all(window) + 1, int(bad.nonzero()[0]) + 1
                return f" in window {number} of the calibration text, from its token {token} on"
        return ""

    def lane_ends(self) -> Iterator[bool]:
        """Of each of `batches`, whether a lane ends with it."""
        ends = {lane.stop for lane in self.lanes.own}
        return (part.stop in ends for part in self._slices())

    def _slices(self) -> Iterator[slice]:
        for lane in self.lanes.own:
            for first in range(lane.start, lane.stop, self._batch):
                yield slice(first, min(first + self._batch, lane.stop))


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
