"""An artifact's tensors as reference layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fut_runtime.artifact.fragment import dequantize_int4
from fut_runtime.artifact.layout import NORM_OF_MODULE
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.rows import to_natural_rows
from fut_runtime.artifact.spec import MODULES
from fut_runtime.errors import UnsupportedError
from fut_runtime.reference.layer import LayerWeights
from fut_runtime.reference.projection import Projection


@dataclass(frozen=True)
class WeightLoader:
    """Reads projections of an artifact onto a device.

    `resident`: hold the dequantised FP32 weights; otherwise dequantise at every use, which keeps a large model at its
    packed size.
    """

    artifact: Artifact
    device: torch.device
    resident: bool

    def layer(self, index: int, weight_format: str) -> LayerWeights:
        """One layer with the weights stored as `e4m3`, `int4` or `bf16`."""
        prefix = f"layers.{index}"
        projections = {}
        for module in MODULES:
            norm = NORM_OF_MODULE.get(module)
            gain_name = None if norm is None else f"{prefix}.{norm}"
            projections[module] = self.projection(f"{prefix}.{module}", weight_format, gain_name)
        norms: list[Tensor | None] = [None, None]
        if self.artifact.manifest.model.qk_norm:
            norms = [self._vector(f"{prefix}.{n}_norm") for n in ("q", "k")]
        return LayerWeights(projections, q_norm=norms[0], k_norm=norms[1])

    def head(self) -> Projection:
        """Output head: the embedding with the final norm's gain where it is tied and BF16, else its own tensor."""
        manifest = self.artifact.manifest
        if "head" in manifest.weights:
            return self.projection("head", manifest.head, "final_norm")
        return Projection(self._held(self.embed), gain=self._vector("final_norm"))

    def embed(self) -> Tensor:
        """Embedding [vocab, hidden], BF16."""
        return self.artifact.tensor("embed").to(self.device)

    def projection(self, name: str, weight_format: str, gain_name: str | None) -> Projection:
        """One projection.

        Raises:
            UnsupportedError: the artifact does not carry the module in that format; the message says which it does.
        """
        formats = self.artifact.manifest.weights[name]
        if weight_format not in formats:
            raise UnsupportedError(
                f"{self.artifact.path}: {name} is stored as {sorted(formats)}, not as {weight_format}: choose another "
                f"mode, or convert with --weights including {weight_format}"
            )
        spec = formats[weight_format]
        bias = f"{name}.bias"
        return Projection(
            weight=self._held(self._weight(name, weight_format)),
            channel_scale=self._channel_scale(name) if weight_format == "e4m3" else None,
            gain=self._vector(gain_name) if spec.gain == "runtime" and gain_name is not None else None,
            bias=self._vector(bias) if self.artifact.has(bias) else None,
        )

    def _vector(self, name: str) -> Tensor:
        return self.artifact.tensor(name).to(self.device)

    def _held(self, make: Callable[[], Tensor]) -> Tensor | Callable[[], Tensor]:
        return make().to(torch.float32) if self.resident else make

    def _channel_scale(self, name: str) -> Tensor:
        spec = self.artifact.manifest.weights[name]["e4m3"]
        stored = self.artifact.tensor(f"{name}.e4m3_scale")
        return to_natural_rows(stored, spec.row_order, spec.shape[0]).to(self.device)

    def _weight(self, name: str, weight_format: str) -> Callable[[], Tensor]:
        spec = self.artifact.manifest.weights[name][weight_format]
        rows, cols = spec.shape
        if weight_format == "int4":
            codes, scales = self.artifact.codes_and_scales(name, self.device)
            return lambda: dequantize_int4(codes, scales)[:, :cols]
        stored = self.artifact.tensor(f"{name}.{weight_format}").to(self.device)
        # Bytes move faster than float8 through indexing, and some devices cannot index float8 at all.
        raw = stored.view(torch.uint8) if weight_format == "e4m3" else stored
        natural = to_natural_rows(raw, spec.row_order, rows)[:, :cols].contiguous().view(stored.dtype)
        return lambda: natural.to(torch.float32)
