"""GPTQ checkpoints of AutoGPTQ and GPTQModel, 4 bits.

A matrix is `qweight` I32 [in/8, out], code of (k, n) in word (k // 8, n) at bits 4·(k mod 8); `scales` [groups, out];
`qzeros` I32 [groups, out/8]; `g_idx` I32 [in], the group of each input. Version 1 of the format stores zero points less
one, version 2 as they are (https://github.com/ModelCloud/GPTQModel, `gptqmodel/utils/model.py`,
`convert_gptq_v1_to_v2_format`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fut_convert.errors import UnsupportedModelError
from fut_convert.sources.fields import Fields
from fut_convert.sources.grouped_codes import SYMMETRIC_ZERO, Grouping, unpack_nibbles
from fut_convert.sources.stored_format import GroupedFormat, ReadTensor, StoredMatrix, require_four_bits

#: Values of `checkpoint_format` (GPTQModel also: `format`), and whether they store zero points as they are.
_VERSIONS: dict[str, bool] = {"gptq": False, "gptq_v2": True}
_ORIGINAL = "give the checkpoint in GPTQ's own format, or the original one"


#: 1 in each of the eight nibbles of a word.
_ONES = 0x11111111


class GptqFormat(GroupedFormat):
    """GPTQ as a config sets it.

    Attributes:
        group_size: inputs a group; None where one group spans them all.
        per_module: whether the config gives modules settings of their own (GPTQModel's `dynamic`).
        plain_zeros: whether zero points are stored as they are (version 2).
        borrowed: whether version 1 was made by taking 1 from each zero point in whole words, as GPTQModel does: a zero
            point of 0 then borrows from the one after it.
    """

    name = "gptq"
    title = "GPTQ"
    required = ("qweight", "qzeros", "scales")
    optional = ("g_idx",)
    scales_part = "scales"

    def __init__(self, group_size: int | None, *, per_module: bool, plain_zeros: bool, borrowed: bool) -> None:
        self.group_size, self.per_module = group_size, per_module
        self.plain_zeros, self.borrowed = plain_zeros, borrowed

    @classmethod
    def from_config(cls, fields: Fields) -> GptqFormat:
        """The format that a `quantization_config` or `quantize_config.json` describes.

        Raises:
            UnsupportedModelError: another number of bits, or the order of another kernel.
            CheckpointError: a key has a senseless value.
        """
        version = str(fields.data.get("checkpoint_format") or fields.data.get("format") or "gptq")
        if fields.boolean("is_marlin_format", False) or version == "marlin":
            raise UnsupportedModelError(
                f"{fields.where}: the codes are in the order of the Marlin kernel (is_marlin_format), which cannot be "
                f"converted; {_ORIGINAL}"
            )
        if version not in _VERSIONS:
            raise UnsupportedModelError(
                f"{fields.where}: checkpoint_format is {version!r}, readable are {', '.join(_VERSIONS)}; {_ORIGINAL}"
            )
        require_four_bits(fields, "bits", "GPTQ")
        size = None if fields.data.get("group_size") == -1 else fields.required_int("group_size")
        return cls(
            size,
            per_module=bool(fields.data.get("dynamic")),
            plain_zeros=_VERSIONS[version],
            borrowed=_is_by_gptqmodel(fields),
        )

    def shape(self, matrix: StoredMatrix) -> tuple[int, int]:
        words = matrix.parts["qweight"].shape
        if len(words) != 2:
            raise matrix.error("qweight", f"has shape {list(words)}, expected [in/8, out]")
        rows, columns = words[1], words[0] * 8
        matrix.expect("qweight", words, "I32")
        groups = -(-columns // self._group_size(matrix))
        matrix.expect("scales", (groups, rows), "F16", "BF16", "F32")
        matrix.expect("qzeros", (groups, -(-rows // 8)), "I32")
        if "g_idx" in matrix.parts:
            matrix.expect("g_idx", (columns,), "I32", "I64")
        return rows, columns

    def grouping(self, matrix: StoredMatrix, read: ReadTensor) -> Grouping:
        count, size = matrix.parts["scales"].shape[0], self._group_size(matrix)
        return Grouping(size, count, self._zeros(matrix, read), matrix.group_index("g_idx", read, size, count))

    def read_codes(self, matrix: StoredMatrix, read: ReadTensor) -> Tensor:
        # [in/8, out, 8] -> [out, in]
        return unpack_nibbles(read(matrix.parts["qweight"])).transpose(0, 1).flatten(1)

    def read_scales(self, matrix: StoredMatrix, read: ReadTensor) -> Tensor:
        return read(matrix.parts["scales"]).T.contiguous()

    def _group_size(self, matrix: StoredMatrix) -> int:
        columns, groups = 8 * matrix.parts["qweight"].shape[0], matrix.parts["scales"].shape[0]
        if self.per_module and groups and columns % groups == 0:
            return columns // groups
        return self.group_size or max(1, columns)

    def _zeros(self, matrix: StoredMatrix, read: ReadTensor) -> Tensor | None:
        rows = matrix.parts["qweight"].shape[1]
        stored = unpack_nibbles(read(matrix.parts["qzeros"]))
        flat = stored.flatten(1)[:, :rows]
        # Labels of versions lie; but 7 everywhere or 8 everywhere is what symmetric matrices have in either version.
        if int(flat[0, 0]) in (7, 8) and bool((flat == flat[0, 0]).all()):
            return None
        if self.plain_zeros:
            zeros = flat
        elif self.borrowed:
            zeros = unpack_nibbles(read(matrix.parts["qzeros"]) + _ONES).flatten(1)[:, :rows]
        else:
            zeros = self._add_one(matrix, stored).flatten(1)[:, :rows]
        return None if bool((zeros == SYMMETRIC_ZERO).all()) else zeros.T.contiguous()

    def _add_one(self, matrix: StoredMatrix, stored: Tensor) -> Tensor:
        """Zero points of version 1, uint8 [..., 8 nibbles].

        A zero point of 0 is stored as -1. Packers that forget to mask it flood the rest of its word with ones, and what
        should be there is lost. Where one such nibble has others than 15 above it, the packer did mask.
        """
        ones = stored == 15
        inside = ones[..., :-1] & ~ones[..., 1:]
        from_first = ones.to(torch.uint8).cummax(dim=-1).values.bool()
        flooded = ones[..., 6] & (from_first == ones).all(dim=-1)
        if bool(flooded.any()) and not bool(inside.any()):
            raise matrix.error(
                "qzeros", f"is corrupt: in {int(flooded.sum())} words a zero point of 0, stored as -1, has overwritten "
                "those after it, as AutoGPTQ does with asymmetric matrices in version 1 of the format; quantize the "
                "original again (symmetric, or checkpoint_format gptq_v2), or give the original",
            )  # fmt: skip
        return (stored + 1) & 15


def _is_by_gptqmodel(fields: Fields) -> bool:
    """Whether the config names GPTQModel as what wrote the file."""
    meta = fields.data.get("meta")
    named = meta.get("quantizer") if isinstance(meta, dict) else None
    names = named if isinstance(named, list) else [named]
    return any(isinstance(name, str) and name.startswith("gptqmodel") for name in names)
