"""One weight matrix into the tensors of its stored formats, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fut_convert.quantize.fold import fold_gain
from fut_convert.quantize.fp8 import quantize_e4m3
from fut_convert.quantize.rtn import CODE_OFFSET, rtn_int4
from fut_convert.quantize.scales import int4_scales
from fut_runtime.artifact.fragment import pack_codes, pack_scales
from fut_runtime.artifact.manifest import WeightSpec
from fut_runtime.artifact.rows import to_stored_rows

#: Weights handled at once: on a CPU the temporaries of a block stay in the caches.
_BLOCK_CPU = 1 << 20
_BLOCK_GPU = 1 << 27

_SCALE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class QuantizedModule:
    """Tensors by suffix (`e4m3`, `e4m3_scale`, `int4`, …) and the error of each format.

    `error` is the relative error of the matrix, sqrt(Σ h (w - ŵ)² / Σ h w²), with h the mean square of the input
    channel where that is known, else 1: the diagonal part of the relative error of its output.
    """

    tensors: dict[str, Tensor]
    error: dict[str, float]


def quantize_module(
    weight: Tensor,
    specs: Mapping[str, WeightSpec],
    *,
    gain: Tensor | None = None,
    second_moment: Tensor | None = None,
    device: torch.device | None = None,
) -> QuantizedModule:
    """Store a matrix in every format of `specs`.

    Args:
        weight: [out, in] in natural row order, the checkpoint's dtype.
        specs: format -> how it is stored.
        gain: [in] of the RMSNorm before it; folded where a spec says so.
        second_moment: FP64 [in], mean square of the input *before* the gain, from calibration.
        device: where to compute; the weight's own by default.

    Raises:
        ConvertError: a weight is not finite, or a scale does not fit its type.
    """
    device = weight.device if device is None else device
    gain = None if gain is None else gain.to(device, torch.float32)
    moment = None if second_moment is None else second_moment.to(device, torch.float64)
    quantizers = [_Quantizer(spec, gain, moment, device) for spec in specs.values()]
    rows = max(1, (_BLOCK_CPU if device.type == "cpu" else _BLOCK_GPU) // weight.shape[1])
    for block in weight.split(rows):
        values = block.to(device, torch.float32)
        for quantizer in quantizers:
            quantizer.add(values, block)
    tensors: dict[str, Tensor] = {}
    for quantizer in quantizers:
        tensors.update(quantizer.finish())
    return QuantizedModule(tensors, {q.spec.format: q.relative_error for q in quantizers})


class _Quantizer:
    """Collects the blocks of one format."""

    def __init__(self, spec: WeightSpec, gain: Tensor | None, moment: Tensor | None, device: torch.device) -> None:
        self.spec = spec
        self.gain = gain if spec.gain == "folded" else None
        cols = spec.shape[1]
        self.extra = spec.padded_shape[1] - cols
        # What multiplies the stored weights: the activation before the gain where the gain is folded, else after it.
        if moment is not None and gain is not None and spec.gain == "runtime":
            moment = moment * gain.double().square()
        self.moment = None if moment is None else pad(moment.to(torch.float32), (0, self.extra))
        self.codes: list[Tensor] = []
        self.scales: list[Tensor] = []
        self.lost = torch.zeros((), dtype=torch.float64, device=device)
        self.total = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def relative_error(self) -> float:
        total = self.total.item()
        return float((self.lost.item() / total) ** 0.5) if total > 0 else 0.0

    def add(self, values: Tensor, stored: Tensor) -> None:
        """Quantize a block: FP32 values, and the same as the checkpoint stores them."""
        if self.spec.format == "bf16":
            codes = stored.to(values.device, torch.bfloat16)
            self.codes.append(pad(codes, (0, self.extra)) if self.extra else codes)
            self._measure(values, codes.to(torch.float32))
            return
        if self.gain is not None:
            values = fold_gain(values, self.gain)
        if self.extra:
            values = pad(values, (0, self.extra))
        if self.spec.format == "e4m3":
            codes, scales = quantize_e4m3(values)
            self._measure(values, codes.to(torch.float32).mul_(scales[:, None]))
            codes = codes.view(torch.uint8)
        else:
            group = self.spec.group_size or 0
            scales = int4_scales(
                values,
                group,
                self.spec.scale_method or "",
                second_moment=self.moment if self.spec.scale_method == "weighted_search" else None,
                scale_dtype=_SCALE_DTYPES[self.spec.scale_dtype or ""],
            )
            codes = rtn_int4(values, scales, group)
            decoded = codes.unflatten(1, (-1, group)).to(torch.float32).sub_(CODE_OFFSET)
            self._measure(values, decoded.mul_(scales.to(torch.float32)[..., None]).flatten(1))
        self.codes.append(codes)
        self.scales.append(scales)

    def _measure(self, values: Tensor, decoded: Tensor) -> None:
        lost, total = decoded.sub_(values).square_(), values.square()
        if self.moment is not None:
            moment = self.moment[: values.shape[1]]
            self.lost += (lost.sum(0) * moment).sum().double()
            self.total += (total.sum(0) * moment).sum().double()
        else:
            self.lost += lost.sum().double()
            self.total += total.sum().double()

    def finish(self) -> dict[str, Tensor]:
        """The stored tensors, on the CPU."""
        spec = self.spec
        rows = spec.padded_shape[0]
        codes = to_stored_rows(_joined(self.codes), spec.row_order, rows)
        if spec.format == "bf16":
            return {"bf16": codes.cpu()}
        scales = to_stored_rows(_joined(self.scales), spec.row_order, rows)
        if spec.format == "e4m3":
            return {"e4m3": codes.view(torch.float8_e4m3fn).cpu(), "e4m3_scale": scales.cpu()}
        # Padding rows hold code 0 with scale 0, which decodes to zero.
        return {
            "int4": pack_codes(codes, spec.nibble_order or "").cpu(),
            "int4_scale": pack_scales(scales, spec.scale_order or "").cpu(),
        }


def _joined(parts: list[Tensor]) -> Tensor:
    """All blocks in one tensor, freeing each as it is copied."""
    if len(parts) == 1:
        return parts.pop()
    rows = sum(p.shape[0] for p in parts)
    whole = parts[0].new_empty((rows, *parts[0].shape[1:]))
    first = 0
    while parts:
        part = parts.pop(0)
        whole[first : first + part.shape[0]] = part
        first += part.shape[0]
    return whole
