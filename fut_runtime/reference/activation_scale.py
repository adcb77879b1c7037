"""Scales of the E4M3 activations: delayed, per request, or frozen; absolute maxima and saturation counts by site."""

from __future__ import annotations

import torch
from torch import Tensor

from fut_runtime.artifact.layout import SITES
from fut_runtime.reference.numerics import E4M3_MAX, to_e4m3, true_divide

SCALE_MODES: tuple[str, ...] = ("request", "delayed", "frozen")


class ActivationScales:
    """State of the E4M3 sites of all layers: one for an engine (`delayed`), or one for each request (`request`).

    A call quantises with the scale that the call before left: s = margin · amax / 448 of that call's absolute
    maximum. The caller ends each call with `next_call`; a call may quantise several requests. The first call uses
    the artifact's initial scales. `frozen` keeps those for ever. A zero or non-finite maximum leaves the scale as it
    was and is counted in `ignored`.

    Attributes:
        scale: FP32 [layers, 4], the scales in force, in the order of `SITES`.
        saturated: int64 [layers, 4], elements that saturated so far.
        elements: int64 [layers, 4], elements quantised so far.
        ignored: number of maxima that were zero or not finite.
    """

    def __init__(self, initial: Tensor, margin: float, *, frozen: bool) -> None:
        self.scale = initial.clone()
        self.margin = margin
        self.frozen = frozen
        self.saturated = torch.zeros(initial.shape, dtype=torch.int64, device=initial.device)
        self.elements = torch.zeros_like(self.saturated)
        self.ignored = 0
        self._amax = torch.zeros_like(initial)
        self._seen = torch.zeros(initial.shape, dtype=torch.bool, device=initial.device)

    def quantize(self, layer: int, site: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """E4M3 values of x (in x's dtype) and the FP32 scale they carry; records the maximum for the next call."""
        column = SITES.index(site)
        scale = self.scale[layer, column]
        self._amax[layer, column] = torch.maximum(self._amax[layer, column], x.abs().amax().to(torch.float32))
        self._seen[layer, column] = True
        values, saturated = to_e4m3(x, scale)
        self.saturated[layer, column] += saturated
        self.elements[layer, column] += x.numel()
        return values, scale

    def next_call(self) -> None:
        """End a call: adopt the maxima it recorded, unless the scales are frozen."""
        usable = self._seen & self._amax.isfinite() & (self._amax > 0)
        self.ignored += int((self._seen & ~usable).sum())
        if not self.frozen:
            self.scale = torch.where(usable, true_divide(self.margin * self._amax, E4M3_MAX), self.scale)
        self._amax.zero_()
        self._seen.zero_()
