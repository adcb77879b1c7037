"""The calibration of a conversion, layer by layer: what it measures, and the codes that GPTQ chooses by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fut_convert.activation_store import ActivationStore
from fut_convert.calibration import Calibration, LayerStatistics, calibration_layer
from fut_convert.checkpoint_model import LayerParts
from fut_convert.errors import ConvertError
from fut_convert.gptq_layers import GptqLayers
from fut_convert.lanes import Lanes
from fut_convert.manifest import solved_by_gptq
from fut_convert.original_layer import OriginalLayer
from fut_convert.quantize.module import Int4Codes
from fut_convert.recipe import GptqRecipe
from fut_convert.steps import StepClock
from fut_runtime.artifact.manifest import Manifest
from fut_runtime.reference.numerics import ACTIVATION_DTYPE

#: room(owner, name, shape) -> where activations of this shape are kept; the owner is a key of `holders`.
OwnedRoom = Callable[[str, str, tuple[int, int, int]], ActivationStore]


class CalibratedLayers:
    """What calibration carries from layer to layer, in one process or in one of several that share the windows.

    Attributes:
        gptq: the layers of GPTQ, where the recipe has them.
    """

    def __init__(
        self,
        manifest: Manifest,
        windows: Tensor,
        embed: Tensor | None,
        device: torch.device,
        room: OwnedRoom,
        lanes: Lanes,
        clock: StepClock,
    ) -> None:
        """Begin before the first layer; the arguments are those of `Calibration`."""
        self.lanes = lanes
        self._manifest, self._device, self._clock = manifest, device, clock
        with clock("calibrate"):
            own = partial(room, "calibration")
            self._calibration = Calibration(manifest.model, windows, embed, device, own, lanes)
        self.gptq: GptqLayers | None = None
        if solved_by_gptq(manifest):
            recipe = GptqRecipe(**manifest.recipe["gptq"])
            self.gptq = GptqLayers(manifest, recipe, windows, embed, device, partial(room, "gptq"), lanes)

    def holders(self) -> dict[str, ActivationStore]:
        """Hidden states of this process's windows after the layers that are done, by name."""
        stores = {"calibration": self._calibration.hidden}
        return stores if self.gptq is None else {**stores, "gptq": self.gptq.hidden}

    def restore(self, files: Mapping[str, Path]) -> None:
        """Take the hidden states of files that hold those of all windows, by the names of `holders`.

        Raises:
            ArtifactError: a file cannot be read.
        """
        own = [(lane, place) for lane, owner, place in self.lanes.places() if owner == self.lanes.rank]
        for name, store in self.holders().items():
            store.restore(files[name], own)

    def saved(self, name: str) -> Iterator[Tensor]:
        """The hidden states of all windows in order, in host memory, in the first process; the others `send_saved`."""
        store = self.holders()[name]
        for _, owner, place in self.lanes.places():
            if owner == self.lanes.rank:
                yield from store.parts(place)
                continue
            for _ in range(place.start, place.stop):
                shape = (1, *store.shape[1:])
                yield self.lanes.receive(torch.empty(shape, dtype=ACTIVATION_DTYPE, device=self._device), owner).cpu()

    def send_saved(self) -> None:
        """Send the first process this one's share of what it saves."""
        for store in self.holders().values():
            for window in range(self.lanes.count):
                self.lanes.send(store.load(slice(window, window + 1)))

    def layer(
        self, index: int, weights: Mapping[str, Tensor], parts: LayerParts, kept: Mapping[str, Int4Codes]
    ) -> tuple[dict[str, Int4Codes], LayerStatistics]:
        """Take all windows through a layer; `GptqLayers.layer` has the arguments.

        Returns:
            The codes that are kept or chosen, by module, and what the checkpoint's own layer saw.

        Raises:
            ConvertError: what is measured is not finite, or GPTQ cannot quantize a module.
        """
        own = calibration_layer(weights, parts.gains, parts.biases, parts.head_norms, self._device)
        chosen = dict(kept)
        original: OriginalLayer | None = None
        if self.gptq is not None:
            # Before the checkpoint's windows advance: the quantized layer is to reproduce what it makes of them.
            if self.gptq.corrects:
                original = OriginalLayer(self._calibration, own)
            with self._clock("gptq"):
                chosen = self.gptq.layer(
                    index, weights, parts.gains, parts.biases, parts.head_norms, original, chosen
                )  # fmt: skip
        with self._clock("calibrate"):
            # It runs now unless it has run beside GPTQ's.
            statistics = self._calibration.run_layer(own) if original is None else original.statistics()
        for site, moment in statistics.second_moment.items():
            if not (statistics.amax[site] < float("inf") and bool(moment.isfinite().all())):
                raise ConvertError(
                    f"calibration: the input of layers.{index}.{site} is not finite{self._calibration.spoilt()}; "
                    "the checkpoint overflows 16 bits, or the calibration text drives it there: try another text, or "
                    "--no-calibration"
                )
        return chosen, statistics

    def head_moment(self) -> Tensor:
        """See `Calibration.head_second_moment`."""
        return self._calibration.head_second_moment()

    def close(self) -> None:
        """Give the room back."""
        for store in self.holders().values():
            store.close()
