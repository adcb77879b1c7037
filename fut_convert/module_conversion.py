"""Matrices of the checkpoint into modules of the artifact, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fut_convert.checkpoint_model import Rows, module_gain, stacked_rows, weight_names
from fut_convert.errors import ConvertError
from fut_convert.fold_values import fold_rows
from fut_convert.kept_codes import is_kept, load_kept_codes
from fut_convert.quantize.module import Int4Codes, ModuleQuantizer, RowBlock, relative_error
from fut_convert.sources import Source
from fut_convert.steps import StepClock
from fut_convert.workers import Workers
from fut_runtime.artifact.manifest import Manifest
from fut_runtime.artifact.spec import MODULES

#: write_rows(name, start, rows), see `ArtifactWriter.write_rows`.
WriteRows = Callable[[str, int, Tensor], None]


@dataclass(frozen=True)
class LayerWork:
    """The modules of a layer, to be converted from the checkpoint.

    Attributes:
        layer: which.
        formats: those to be stored.
        second_moment: FP64 [in] of each module's input before the gain; None without calibration.
    """

    layer: int
    formats: frozenset[str]
    second_moment: Mapping[str, Tensor] | None


class ModuleConverter:
    """Reads, quantizes and writes modules, each block of rows in one of the workers."""

    def __init__(
        self,
        source: Source,
        manifest: Manifest,
        write_rows: WriteRows,
        workers: Workers,
        device: torch.device,
        clock: StepClock,
    ) -> None:
        self._source, self._manifest, self._write_rows = source, manifest, write_rows
        self._workers, self._device, self._clock = workers, device, clock

    def formats(self, name: str) -> list[str]:
        """The formats that a module is stored in."""
        return list(self._manifest.weights[name])

    def kept_codes(self, name: str, matrices: Sequence[str]) -> Int4Codes | None:
        """The checkpoint's own codes of a module that keeps them."""
        spec = self._manifest.weights[name].get("int4")
        if spec is None or not is_kept(spec):
            return None
        with self._clock("read"):
            return load_kept_codes(self._source, matrices, spec, self._device)

    def layer(self, work: LayerWork) -> dict[str, float]:
        """Convert a layer's modules from the checkpoint; the errors as of `convert`, of all of them."""
        errors: dict[str, float] = {}
        for module in MODULES:
            name = f"layers.{work.layer}.{module}"
            formats = [f for f in self.formats(name) if f in work.formats]
            if not formats:
                continue
            matrices = weight_names(work.layer, module)
            gain = module_gain(self._source.load, work.layer, module)
            moment = None if work.second_moment is None else work.second_moment[module]
            kept = self.kept_codes(name, matrices) if "int4" in formats else None
            rows = fold_rows(stacked_rows(self._source, matrices), self._manifest, module)
            errors |= self.convert(name, rows, gain, moment, kept, formats)
        return errors

    def convert(
        self,
        name: str,
        rows: Rows,
        gain: Tensor | None,
        moment: Tensor | None,
        int4: Int4Codes | None = None,
        formats: Collection[str] | None = None,
    ) -> dict[str, float]:
        """Convert a matrix.

        Args:
            name: the module's in the artifact.
            rows: its rows in the checkpoint.
            gain, moment, int4: see `ModuleQuantizer`.
            formats: only these of the formats it is stored in.

        Returns:
            `name.format` -> relative error.
        """
        specs = {f: spec for f, spec in self._manifest.weights[name].items() if formats is None or f in formats}
        quantizer = ModuleQuantizer(specs, gain=gain, second_moment=moment, int4=int4, device=self._device)

        def convert_block(block: RowBlock) -> dict[str, Tensor]:
            with self._clock("read"):
                parts = [rows(start, stop) for start, stop in block.ranges]
            try:
                with self._clock("quantize"):
                    done = quantizer.quantize(block, parts)
            except ConvertError as error:
                raise type(error)(f"{name}: {error}") from error
            with self._clock("write"):
                for suffix, (first, part) in done.tensors.items():
                    self._write_rows(f"{name}.{suffix}", first, part)
            return done.squares

        squares = self._workers.map(convert_block, quantizer.blocks())
        return {f"{name}.{f}": relative_error(block[f] for block in squares) for f in specs}
