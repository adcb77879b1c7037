"""Compressed-tensors checkpoints (llm-compressor): which of its formats, and INT4 weights, `pack-quantized`.

A matrix is `weight_packed` I32 [out, in/8], code of (n, k) plus 8 in word (n, k // 8) at bits 4·(k mod 8);
`weight_scale` [out, groups]; `weight_shape` [2]; where it is asymmetric `weight_zero_point`, plus 8 and packed along
its rows, I32 [out/8, groups] (older versions: I8 [out, groups], neither); with act-order `weight_g_idx` [in], the group
of each input (https://github.com/vllm-project/compressed-tensors, `compressors/pack_quantized`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fut_convert.errors import UnsupportedModelError
from fut_convert.sources.fields import Fields
from fut_convert.sources.fp8_format import Fp8Format, block_size
from fut_convert.sources.grouped_codes import SYMMETRIC_ZERO, Grouping, unpack_nibbles
from fut_convert.sources.stored_format import GroupedFormat, ReadTensor, StoredFormat, StoredMatrix

_ORIGINAL = "give the original checkpoint (F32, F16 or BF16) it was made from"


def compressed_format(fields: Fields) -> StoredFormat:
    """The format that the `quantization_config` of a compressed-tensors checkpoint describes.

    Raises:
        UnsupportedModelError: sparse weights, several kinds of them, or a kind that cannot be read.
        CheckpointError: a key has a senseless value.
    """
    sparsity = fields.section("sparsity_config")
    if sparsity is not None and sparsity.data.get("format") not in (None, "dense"):
        raise UnsupportedModelError(
            f"{sparsity.where}: the weights are sparse ({sparsity.data.get('format')}), which cannot be converted; "
            f"{_ORIGINAL}"
        )
    if fields.section("transform_config") is not None:
        raise UnsupportedModelError(
            f"{fields.where}: transform_config rotates activations at run time, which cannot be converted; {_ORIGINAL}"
        )
    groups = fields.section("config_groups")
    schemes = [groups.section(name) for name in groups.data] if groups is not None else []
    weights = [scheme.section("weights") for scheme in schemes if scheme is not None]
    kinds = {
        (str(section.data.get("type")), section.optional_int("num_bits")) for section in weights if section is not None
    }
    formats = {str(scheme.data.get("format") or fields.data.get("format")) for scheme in schemes if scheme is not None}
    if kinds == {("int", 4)} and formats == {"pack-quantized"}:
        return CompressedFormat({_group_size(section) for section in weights if section is not None})
    if kinds == {("float", 8)} and formats <= {"float-quantized", "naive-quantized"}:
        blocks = {_block(section) for section in weights if section is not None}
        if len(blocks) == 1:
            return Fp8Format(blocks.pop())
    found = ", ".join(sorted(f"{kind} of {bits} bits" for kind, bits in kinds)) or "nothing"
    raise UnsupportedModelError(
        f"{fields.where}: holds {found} in the format {' and '.join(sorted(formats)) or 'None'} of compressed-tensors; "
        f"readable are int of 4 bits in pack-quantized and float of 8 bits in float-quantized; {_ORIGINAL}"
    )


def _block(weights: Fields) -> tuple[int, int] | None:
    strategy = str(weights.data.get("strategy"))
    if not weights.boolean("symmetric", True):
        raise UnsupportedModelError(
            f"{weights.where}: the FP8 weights are asymmetric (symmetric is false), which cannot be converted; "
            f"{_ORIGINAL}"
        )
    if strategy not in ("tensor", "channel", "block"):
        raise UnsupportedModelError(
            f"{weights.where}: strategy is {strategy!r}, readable are tensor, channel and block; {_ORIGINAL}"
        )
    return block_size(weights, "block_structure") if strategy == "block" else None


def _group_size(weights: Fields) -> int | None:
    strategy = str(weights.data.get("strategy"))
    if strategy not in ("group", "channel"):
        raise UnsupportedModelError(
            f"{weights.where}: strategy is {strategy!r}, readable are group and channel; {_ORIGINAL}"
        )
    return None if strategy == "channel" else weights.required_int("group_size")


class CompressedFormat(GroupedFormat):
    """Packed INT4 weights; `group_sizes` are those of the config's groups, None for one group over all inputs."""

    name = "compressed-tensors"
    title = "compressed-tensors"
    required = ("weight_packed", "weight_scale")
    optional = ("weight_shape", "weight_zero_point", "weight_g_idx")
    scales_part = "weight_scale"

    def __init__(self, group_sizes: set[int | None]) -> None:
        self.group_sizes = group_sizes

    def shape(self, matrix: StoredMatrix) -> tuple[int, int]:
        words = matrix.parts["weight_packed"].shape
        if len(words) != 2:
            raise matrix.error("weight_packed", f"has shape {list(words)}, expected [out, in/8]")
        rows, columns = words[0], words[1] * 8
        matrix.expect("weight_packed", words, "I32")
        scales = matrix.parts["weight_scale"]
        counts = {-(-columns // (size or max(1, columns))) for size in self.group_sizes}
        if len(scales.shape) != 2 or scales.shape[1] not in counts:
            counted = " or ".join(str(count) for count in sorted(counts))
            raise matrix.error(
                "weight_scale", f"has shape {list(scales.shape)}, expected [{rows}, {counted}] by the config's group "
                "size; config and weights do not belong together",
            )  # fmt: skip
        groups = scales.shape[1]
        matrix.expect("weight_scale", (rows, groups), "F16", "BF16", "F32")
        if "weight_shape" in matrix.parts:
            matrix.expect("weight_shape", (2,), "I64", "I32")
        if "weight_g_idx" in matrix.parts:
            matrix.expect("weight_g_idx", (columns,), "I32", "I64")
        if "weight_zero_point" in matrix.parts:
            packed = matrix.parts["weight_zero_point"].dtype == "I32"
            matrix.expect("weight_zero_point", (-(-rows // 8) if packed else rows, groups), "I32", "I8")
        return rows, columns

    def grouping(self, matrix: StoredMatrix, read: ReadTensor) -> Grouping:
        self._check_shape(matrix, read)
        rows, columns = self.shape(matrix)
        count = matrix.parts["weight_scale"].shape[1]
        size = next(s or columns for s in self.group_sizes if -(-columns // (s or columns)) == count)
        zeros = None
        if "weight_zero_point" in matrix.parts:
            stored = read(matrix.parts["weight_zero_point"])
            if stored.dtype == torch.int32:
                zeros = unpack_nibbles(stored.T).flatten(1)[:, :rows].T.contiguous()
            else:
                zeros = (stored + SYMMETRIC_ZERO).to(torch.uint8)
            zeros = None if bool((zeros == SYMMETRIC_ZERO).all()) else zeros
        index = matrix.group_index("weight_g_idx", read, size, count)
        return Grouping(size, count, zeros, index)

    def read_codes(self, matrix: StoredMatrix, read: ReadTensor) -> Tensor:
        return unpack_nibbles(read(matrix.parts["weight_packed"])).flatten(1)

    def read_scales(self, matrix: StoredMatrix, read: ReadTensor) -> Tensor:
        return read(matrix.parts["weight_scale"])

    def _check_shape(self, matrix: StoredMatrix, read: ReadTensor) -> None:
        if "weight_shape" not in matrix.parts:
            return
        found: Any = read(matrix.parts["weight_shape"]).tolist()
        if found != list(self.shape(matrix)):
            raise matrix.error(
                "weight_shape", f"says {found}, but weight_packed holds {list(self.shape(matrix))}; the file is damaged"
            )
