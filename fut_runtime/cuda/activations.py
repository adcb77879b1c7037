"""Scales of the E4M3 activations on the card: one state for an engine, or one a slot; and what has saturated."""

from __future__ import annotations

import torch
from torch import Tensor

from fut_runtime.artifact.layout import SITES
from fut_runtime.artifact.reader import Artifact
from fut_runtime.errors import UnsupportedError

#: Where scales come from: the same request's previous call, the engine's, or the artifact alone.
SCALE_MODES: tuple[str, ...] = ("request", "delayed", "frozen")


class ActivationState:
    """Device memory of `fut_prefill_config` about activations; see docs/numerics.md.

    Attributes:
        scale_mode: one of SCALE_MODES.
        margin: a call leaves the scale margin · amax / 448.
        scale: F32 [layers, 4, states], in force; a state a slot with `request`, else one.
        amax: int32 [layers, 4, states], bits of the maxima of calls that are not over.
        saturated: int64 [layers, 4].
        ignored: int64 [1], maxima that were zero or not finite.
    """

    def __init__(self, initial: Tensor, margin: float, scale_mode: str, slots: int) -> None:
        """Begin with the artifact's scales, F32 [layers, 4] on the device that is to hold the state.

        Raises:
            UnsupportedError: no such scale mode.
        """
        if scale_mode not in SCALE_MODES:
            raise UnsupportedError(f"scale_mode is {scale_mode!r}, expected one of {', '.join(SCALE_MODES)}")
        self.scale_mode, self.margin = scale_mode, margin
        self._initial = initial
        states = slots if scale_mode == "request" else 1
        self.scale = initial[..., None].repeat(1, 1, states)
        self.amax = torch.zeros(self.scale.shape, dtype=torch.int32, device=initial.device)
        self.saturated = torch.zeros(initial.shape, dtype=torch.int64, device=initial.device)
        self.ignored = torch.zeros(1, dtype=torch.int64, device=initial.device)
        self._latest = 0
        self._rows = 0

    @property
    def states(self) -> int:
        """Number of states."""
        return self.scale.shape[-1]

    def begin_request(self, slot: int) -> None:
        """A slot gets a new request, which begins with the artifact's scales."""
        if self.scale_mode == "request":
            self.scale[..., slot] = self._initial
            self.amax[..., slot] = 0

    def count(self, rows: int, latest_slot: int) -> None:
        """Note a run of so many rows."""
        self._rows += rows
        self._latest = latest_slot if self.scale_mode == "request" else 0

    def report(self, widths: dict[str, int]) -> dict[str, object]:
        """What `ReportsActivations` says; waits for the device. `widths`: elements of a row at each site."""
        layers = self.scale.shape[0]
        return {
            "scale_mode": self.scale_mode,
            "sites": list(SITES),
            "initial_scale": self._initial.tolist(),
            "scale": self.scale[..., self._latest].tolist(),
            "saturated": self.saturated.tolist(),
            "elements": [[self._rows * widths[site] for site in SITES] for _ in range(layers)],
            "ignored_maxima": int(self.ignored),
        }


def initial_scales(artifact: Artifact) -> Tensor:
    """The artifact's scales of every site, F32 [layers, 4]."""
    layers = artifact.manifest.model.num_layers
    return torch.stack([artifact.tensor(f"layers.{i}.activation_scale") for i in range(layers)])
