"""GPTQ over a model: each layer calibrated behind the quantized layers before it, and quantized module by module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fut_convert.activation_store import ActivationStore
from fut_convert.calibration import Room
from fut_convert.errors import ConvertError
from fut_convert.lanes import Lanes
from fut_convert.original_layer import OriginalLayer
from fut_convert.quantize.gptq import GptqResult, GptqSettings
from fut_convert.quantize.module import SCALE_DTYPES, Int4Codes
from fut_convert.quantize.whole_matrix import gptq_module
from fut_convert.recipe import GptqRecipe, corrects
from fut_convert.sequential import SequentialCalibration
from fut_convert.sixteen_bit import SixteenBitProjection
from fut_runtime.artifact.fragment import dequantize_int4
from fut_runtime.artifact.manifest import Manifest, WeightSpec


class GptqLayers:
    """Chooses the INT4 codes of one layer after the other.

    Attributes:
        outcomes: module's name -> damping, fallback, nearest_rows and weighted_error of `GptqResult`.
    """

    def __init__(
        self,
        manifest: Manifest,
        recipe: GptqRecipe,
        windows: Tensor,
        embed: Tensor | None,
        device: torch.device,
        room: Room | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        """Begin before the first layer, with int64 [windows, tokens]; the rest as for `Calibration`."""
        self.outcomes: dict[str, dict[str, Any]] = {}
        self._manifest = manifest
        self._settings = GptqSettings(
            damping=recipe.damping, act_order=recipe.act_order, sweeps=recipe.sweeps, correction=recipe.correction
        )
        self._recipe = recipe
        self._calibration = SequentialCalibration(manifest.model, windows, embed, device, room, lanes)
        self._lanes = self._calibration.lanes
        self._device = device

    @property
    def hidden(self) -> ActivationStore:
        """Hidden states of all windows behind the quantized layers."""
        return self._calibration.hidden

    @property
    def corrects(self) -> bool:
        """Whether each module makes good for those before it, and so needs the checkpoint's layer beside it."""
        return corrects(self._recipe)

    def layer(
        self,
        index: int,
        weights: Mapping[str, Tensor],
        gains: Mapping[str, Tensor],
        biases: Mapping[str, Tensor],
        head_norms: tuple[Tensor, Tensor] | None,
        original: OriginalLayer | None,
        kept: Mapping[str, Int4Codes] | None = None,
    ) -> dict[str, Int4Codes]:
        """Codes of the layer's modules, on the device; the next call takes the layer after it.

        Args:
            weights: module -> [out, in] in the checkpoint's dtype.
            gains: FP32 [in] of the RMSNorm before `qkv` and `gate_up`.
            biases: FP32 [out] of the modules that have one.
            head_norms: Qwen3's q and k gains.
            original: the checkpoint's layer and its windows before it, where `corrects`.
            kept: codes of modules that keep those of the checkpoint, on the device.

        Raises:
            ConvertError: names the module that cannot be calibrated or quantized.
        """
        chosen: dict[str, Int4Codes] = dict(kept or {})
        specs = {module: self._manifest.weights[f"layers.{index}.{module}"]["int4"] for module in weights}
        at_runtime = {module: gain for module, gain in gains.items() if specs[module].gain == "runtime"}

        def quantize(module: str, hessian: Tensor, wanted: Tensor | None) -> SixteenBitProjection:
            spec, name = specs[module], f"layers.{index}.{module}"
            if module not in chosen:
                chosen[module] = self._shared(name, weights[module], spec, hessian, gains.get(module), wanted)
            stored = dequantize_int4(chosen[module].codes, chosen[module].scales)
            gain, bias = at_runtime.get(module), biases.get(module)
            return SixteenBitProjection(
                # Code times scale has up to eleven bits. Rounding them to BF16's eight is a fiftieth of INT4's error.
                stored[:, : spec.shape[1]].to(torch.bfloat16),
                gain=None if gain is None else gain.to(self._device),
                bias=None if bias is None else bias.to(self._device),
            )

        self._calibration.quantize_layer(at_runtime, head_norms, quantize, original)
        return chosen

    def head(self, weight: Tensor, gain: Tensor) -> Int4Codes:
        """Codes of the output head [vocab, hidden], after the last layer."""
        return self._choose("head", weight, self._manifest.weights["head"]["int4"], self.head_hessian(gain), gain)

    def head_hessian(self, gain: Tensor) -> Tensor:
        """The head's Hessian, which the other processes contribute to."""
        spec = self._manifest.weights["head"]["int4"]
        return self._calibration.head_hessian(gain if spec.gain == "runtime" else None)

    def _shared(
        self,
        name: str,
        weight: Tensor,
        spec: WeightSpec,
        hessian: Tensor,
        gain: Tensor | None,
        wanted: Tensor | None,
    ) -> Int4Codes:
        """Codes that the first process chooses, in all of them."""
        if self._lanes.first:
            codes = self._choose(name, weight, spec, hessian, gain, wanted)
        else:
            rows, cols = spec.shape[0], spec.padded_shape[1]
            scales = torch.empty(
                (rows, cols // (spec.group_size or 1)),
                dtype=SCALE_DTYPES[spec.scale_dtype or ""],
                device=self._device,
            )
            codes = Int4Codes(torch.empty((rows, cols), dtype=torch.uint8, device=self._device), scales)
        return Int4Codes(*(self._lanes.share(x.contiguous()) for x in (codes.codes, codes.scales)))

    def _choose(
        self,
        name: str,
        weight: Tensor,
        spec: WeightSpec,
        hessian: Tensor,
        gain: Tensor | None,
        wanted: Tensor | None = None,
    ) -> Int4Codes:
        if not bool(torch.isfinite(hessian).all()):
            where = self._calibration.spoilt()
            raise ConvertError(
                f"calibration: the input of {name} behind the quantized layers is not finite{where}; it overflows 16 "
                "bits: try another calibration text, or int4.method rtn"
            )
        try:
            codes, result = gptq_module(
                weight, spec, hessian, gain=gain, settings=self._settings, wanted=wanted, solver=self._recipe.solver
            )
        except ConvertError as error:
            raise type(error)(f"{name}: {error}") from error
        self.outcomes[name] = _outcome(result)
        return codes


def _outcome(result: GptqResult) -> dict[str, Any]:
    return {
        "damping": result.damping,
        "fallback": result.fallback,
        "nearest_rows": result.nearest_rows,
        "weighted_error": result.weighted_error,
    }
