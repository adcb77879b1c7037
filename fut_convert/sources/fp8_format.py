"""FP8 checkpoints: E4M3 weights with scales a tensor, a row or a block, as four kinds of tools write them.

weight = `weight` F8_E4M3 [out, in] times its scale. The scale is `weight_scale`, one number or [out, 1], of
compressed-tensors (`float-quantized`), FBGEMM (Llama 3.1's own FP8) and AutoFP8; or, with DeepSeek-V3's blocks,
`weight_scale_inv` [⌈out/128⌉, ⌈in/128⌉], which despite its name multiplies too
(https://github.com/deepseek-ai/DeepSeek-V3, `inference/kernel.py`, `weight_dequant`). Scales of activations are not
needed: calibration finds ours.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fut_convert.errors import UnsupportedModelError
from fut_convert.sources.base import TensorInfo
from fut_convert.sources.fields import Fields
from fut_convert.sources.grouped_codes import Packing
from fut_convert.sources.stored_format import ReadTensor, StoredFormat, StoredMatrix

_SCALES = ("weight_scale", "weight_scale_inv")


class Fp8Format(StoredFormat):
    """FP8 as a config sets it; `block` is the (rows, columns) that share a scale, None without blocks."""

    title = "FP8"
    required = ("weight",)
    optional = (*_SCALES, "input_scale", "input_scale_ub", "weight_zero_point")

    def __init__(self, block: tuple[int, int] | None) -> None:
        self.block = block

    @classmethod
    def from_config(cls, fields: Fields) -> Fp8Format:
        """The format that the `quantization_config` of `fp8` or `fbgemm_fp8` describes.

        Raises:
            UnsupportedModelError: another kind of FP8.
            CheckpointError: a key has a senseless value.
        """
        kind = fields.data.get("fmt") or "e4m3"
        if kind != "e4m3":
            raise UnsupportedModelError(
                f"{fields.where}: the weights are in FP8 of the kind {kind!r}, readable is e4m3; give the original "
                "checkpoint (F32, F16 or BF16) it was made from"
            )
        return cls(block_size(fields, "weight_block_size"))

    def matrices(self, tensors: Mapping[str, TensorInfo]) -> list[StoredMatrix]:
        # Every other matrix and every norm has a `weight` too.
        scaled = {name.rpartition(".")[0] for name in tensors if name.endswith(_SCALES)}
        return [
            matrix
            for matrix in super().matrices(tensors)
            if matrix.name in scaled or ("weight" in matrix.parts and matrix.parts["weight"].dtype.startswith("F8_"))
        ]

    def shape(self, matrix: StoredMatrix) -> tuple[int, int]:
        shape = matrix.parts["weight"].shape
        if len(shape) != 2:
            raise matrix.error("weight", f"has shape {list(shape)}, expected [out, in]")
        rows, columns = shape
        matrix.expect("weight", shape, "F8_E4M3")
        part = next((part for part in _SCALES if part in matrix.parts), None)
        if part is None:
            raise matrix.error("weight", "is FP8 and has no weight_scale; the checkpoint is incomplete")
        if self.block is not None:
            expected: tuple[int, ...] = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        else:
            found = matrix.parts[part].shape
            expected = found if found in ((), (1,), (1, 1), (rows,)) else (rows, 1)
        matrix.expect(part, expected, "F32", "BF16", "F16")
        return rows, columns

    def packing(self, matrix: StoredMatrix, read: ReadTensor) -> Packing | None:
        return None

    def weight(self, matrix: StoredMatrix, read: ReadTensor) -> Tensor:
        part = next(part for part in _SCALES if part in matrix.parts)
        scale = read(matrix.parts[part]).to(torch.float32)
        weight = read(matrix.parts["weight"]).to(torch.float32)
        if bad := int((~torch.isfinite(scale)).sum()):
            raise matrix.error(part, f"holds {bad} values that are not finite (NaN or infinity); the file is damaged")
        if self.block is None:
            return weight.mul_(scale.reshape(-1, 1))
        # A block may be larger than the matrix.
        rows, columns = (min(n, size) for n, size in zip(self.block, weight.shape, strict=True))
        for first in range(scale.shape[0]):
            band = weight[first * rows : (first + 1) * rows]
            band *= scale[first].repeat_interleave(columns)[: band.shape[1]]
        return weight


def block_size(fields: Fields, key: str) -> tuple[int, int] | None:
    """Rows and columns that share a scale, or None where the config has no such key.

    Raises:
        CheckpointError: it is not a list of two sizes.
    """
    value = fields.data.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise fields.error(key, "a list of two positive integers")
    return value[0], value[1]
