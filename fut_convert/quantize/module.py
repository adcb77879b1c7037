"""One weight matrix into the tensors of its stored formats, a block of rows at a time.

A block becomes the same bytes whoever quantizes it and whenever, so blocks may be shared between threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fut_convert.quantize.fold import fold_gain
from fut_convert.quantize.fp8 import decode_e4m3, quantize_e4m3
from fut_convert.quantize.rtn import rtn_int4
from fut_convert.quantize.scales import int4_scales
from fut_runtime.artifact.fragment import dequantize_int4, pack_codes, pack_scales
from fut_runtime.artifact.manifest import WeightSpec
from fut_runtime.artifact.orders import TILE_ROWS
from fut_runtime.artifact.rows import to_stored_rows

#: Weights in a block: on a CPU its FP32 temporaries stay in a core's cache.
_BLOCK_CPU = 1 << 18
_BLOCK_GPU = 1 << 27

SCALE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def block_weights(device: torch.device) -> int:
    """Weights in a block, at most, that is quantized on a device."""
    return _BLOCK_CPU if device.type == "cpu" else _BLOCK_GPU


@dataclass(frozen=True)
class RowBlock:
    """Rows that are quantized together: whole tiles of 16 stored rows.

    Attributes:
        ranges: natural rows, the first and the one beyond the last: one range, or the same channels of gate and up.
        first: the stored row that they begin at.
        last: whether the matrix's padding follows.
    """

    ranges: tuple[tuple[int, int], ...]
    first: int
    last: bool


@dataclass(frozen=True)
class QuantizedBlock:
    """What a block became.

    Attributes:
        tensors: suffix (`e4m3`, `e4m3_scale`, `int4`, …) -> where in the stored tensor's first axis, and its part.
        squares: format -> FP64 [2], the squared error of the block and its squared weights, see `relative_error`.
    """

    tensors: dict[str, tuple[int, Tensor]]
    squares: dict[str, Tensor]


@dataclass(frozen=True)
class Int4Codes:
    """INT4 codes that were chosen for a whole matrix, in natural row order.

    Attributes:
        codes: uint8 [out, padded in], values 0..15.
        scales: [out, padded in / group_size] in their storage type.
    """

    codes: Tensor
    scales: Tensor

    def of(self, block: RowBlock) -> tuple[Tensor, Tensor]:
        """Codes and scales of a block."""
        codes, scales = (torch.cat([x[first:stop] for first, stop in block.ranges]) for x in (self.codes, self.scales))
        return codes, scales


class ModuleQuantizer:
    """Stores a matrix in every format of `specs`."""

    def __init__(
        self,
        specs: Mapping[str, WeightSpec],
        *,
        gain: Tensor | None = None,
        second_moment: Tensor | None = None,
        int4: Int4Codes | None = None,
        device: torch.device,
    ) -> None:
        """Prepare for the blocks of one matrix.

        Args:
            specs: format -> how it is stored; all natural in their row order, or all interleaved.
            gain: [in] of the RMSNorm before it; folded where a spec says so.
            second_moment: FP64 [in], mean square of the input *before* the gain, from calibration.
            int4: codes and scales of the INT4 format where they are chosen already, else a block chooses its own.
            device: where to compute.
        """
        gain = None if gain is None else gain.to(device, torch.float32)
        moment = None if second_moment is None else second_moment.to(device, torch.float64)
        self._formats = [
            _Format(spec, gain, moment, int4 if spec.format == "int4" else None) for spec in specs.values()
        ]
        self._device = device
        interleaved = {spec.row_order != "natural" for spec in specs.values()}
        if len(interleaved) != 1:
            raise ValueError("the formats of a matrix are all in natural row order or all interleaved")
        self._halves = 2 if interleaved.pop() else 1
        self._shape = next(iter(specs.values())).shape

    def blocks(self) -> list[RowBlock]:
        """The blocks of the matrix, in the order of its stored rows; they depend on its shape and the device only."""
        rows, cols = self._shape
        half = rows // self._halves
        step = max(1, block_weights(self._device) // cols // TILE_ROWS) * TILE_ROWS // self._halves
        return [
            RowBlock(
                tuple((part * half + first, part * half + min(first + step, half)) for part in range(self._halves)),
                first * self._halves,
                first + step >= half,
            )
            for first in range(0, half, step)
        ]

    def quantize(self, block: RowBlock, rows: Sequence[Tensor]) -> QuantizedBlock:
        """Quantize a block.

        Args:
            block: one of `blocks()`.
            rows: the weights [rows, in] of each of its ranges, in the checkpoint's dtype.

        Returns:
            The parts of the stored tensors, on the CPU.

        Raises:
            ConvertError: a weight is not finite, or a scale does not fit its type.
        """
        stored = (rows[0] if len(rows) == 1 else torch.cat(list(rows))).to(self._device)
        values = stored.to(torch.float32)
        tensors: dict[str, tuple[int, Tensor]] = {}
        squares: dict[str, Tensor] = {}
        for target in self._formats:
            parts, squares[target.spec.format] = target.quantize(block, values, stored)
            tensors.update(parts)
        return QuantizedBlock(tensors, squares)


def relative_error(squares: Iterable[Tensor]) -> float:
    """Relative error of a matrix from `QuantizedBlock.squares` of its blocks.

    sqrt(Σ h (w - ŵ)² / Σ h w²), with h the mean square of the input channel where that is known, else 1: the diagonal
    part of the relative error of the matrix's output.
    """
    lost, total = torch.stack(list(squares)).sum(dim=0).tolist()
    return float((lost / total) ** 0.5) if total > 0 else 0.0


class _Format:
    """One format of a matrix."""

    def __init__(self, spec: WeightSpec, gain: Tensor | None, moment: Tensor | None, chosen: Int4Codes | None) -> None:
        self.spec = spec
        self.chosen = chosen
        self.gain = gain if spec.gain == "folded" else None
        self.extra = spec.padded_shape[1] - spec.shape[1]
        # What multiplies the stored weights: the activation before the gain where the gain is folded, else after it.
        if moment is not None and gain is not None and spec.gain == "runtime":
            moment = moment * gain.double().square()
        self.moment = None if moment is None else pad(moment.to(torch.float32), (0, self.extra))
        self.root = None if self.moment is None else self.moment.sqrt()

    def quantize(self, block: RowBlock, values: Tensor, stored: Tensor) -> tuple[dict[str, tuple[int, Tensor]], Tensor]:
        """Parts of the stored tensors and squares, of FP32 values and the same as the checkpoint stores them."""
        if self.gain is not None:
            values = fold_gain(values, self.gain)
        if self.extra:
            values = pad(values, (0, self.extra))
        if self.spec.format == "bf16":
            return self._bf16(block, values, stored)
        if self.spec.format == "e4m3":
            return self._e4m3(block, values)
        return self._int4(block, values)

    def _bf16(self, block: RowBlock, values: Tensor, stored: Tensor) -> tuple[dict[str, tuple[int, Tensor]], Tensor]:
        if stored.dtype == torch.bfloat16:
            squares = torch.zeros(2, dtype=torch.float64, device=stored.device)
        else:
            squares = self._squares(values, values.to(torch.bfloat16).to(torch.float32))
        codes = stored.to(torch.bfloat16)
        return {"bf16": self._place(block, pad(codes, (0, self.extra)) if self.extra else codes)}, squares

    def _e4m3(self, block: RowBlock, values: Tensor) -> tuple[dict[str, tuple[int, Tensor]], Tensor]:
        codes, scales = quantize_e4m3(values)
        squares = self._squares(values, decode_e4m3(codes, scales))
        first, packed = self._place(block, codes.view(torch.uint8))
        parts = {"e4m3": (first, packed.view(torch.float8_e4m3fn)), "e4m3_scale": self._place(block, scales)}
        return parts, squares

    def _int4(self, block: RowBlock, values: Tensor) -> tuple[dict[str, tuple[int, Tensor]], Tensor]:
        spec, group = self.spec, self.spec.group_size or 0
        codes, scales = self._round_int4(values, group) if self.chosen is None else self.chosen.of(block)
        squares = self._squares(values, dequantize_int4(codes, scales))
        # Padding rows hold code 0 with scale 0, which decodes to zero.
        tile = block.first // TILE_ROWS
        packed = pack_codes(self._stored(block, codes), spec.nibble_order or "")
        packed_scales = pack_scales(self._stored(block, scales), spec.scale_order or "")
        return {"int4": (tile, packed.cpu()), "int4_scale": (tile, packed_scales.cpu())}, squares

    def _round_int4(self, values: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Codes and scales by rounding to nearest."""
        scales = int4_scales(
            values,
            group,
            self.spec.scale_method or "",
            second_moment=self.moment if self.spec.scale_method == "weighted_search" else None,
            scale_dtype=SCALE_DTYPES[self.spec.scale_dtype or ""],
        )
        return rtn_int4(values, scales, group), scales

    def _stored(self, block: RowBlock, rows: Tensor) -> Tensor:
        """Rows of a block in stored order, with the padding that follows them."""
        padded = self.spec.padded_shape[0] - block.first if block.last else len(rows)
        return to_stored_rows(rows, self.spec.row_order, padded)

    def _place(self, block: RowBlock, rows: Tensor) -> tuple[int, Tensor]:
        return block.first, self._stored(block, rows).cpu()

    def _squares(self, values: Tensor, decoded: Tensor) -> Tensor:
        """Squared error and squared weights, FP64 [2]; overwrites `decoded`."""
        lost = decoded.sub_(values)
        if self.root is not None:
            lost, values = lost.mul_(self.root), values * self.root
        return torch.stack([torch.linalg.vector_norm(x).double().square() for x in (lost, values)])
