"""AWQ checkpoints of AutoAWQ in the order of its GEMM kernel, 4 bits.

A matrix is `qweight` I32 [in, out/8], `scales` [groups, out] and `qzeros` I32 [groups, out/8]. Nibble i of word (k, c)
is the code of column 8·c + (0, 2, 4, 6, 1, 3, 5, 7)[i]; zero points lie alike, stored as they are
(https://github.com/casper-hansen/AutoAWQ, `awq/modules/linear/gemm.py`, `WQLinear_GEMM.from_linear`).
"""

from __future__ import annotations

from torch import Tensor

from fut_convert.errors import UnsupportedModelError
from fut_convert.sources.fields import Fields
from fut_convert.sources.grouped_codes import SYMMETRIC_ZERO, Grouping, unpack_nibbles
from fut_convert.sources.stored_format import GroupedFormat, ReadTensor, StoredMatrix, require_four_bits

#: Element j of eight outputs is in this nibble of its word.
_NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]


class AwqFormat(GroupedFormat):
    """AWQ as a config sets it; `group_size` is None where one group spans all inputs."""

    name = "awq"
    title = "AWQ"
    required = ("qweight", "qzeros", "scales")
    scales_part = "scales"

    def __init__(self, group_size: int | None) -> None:
        self.group_size = group_size

    @classmethod
    def from_config(cls, fields: Fields) -> AwqFormat:
        """The format that a `quantization_config` or `quant_config.json` (which has names of its own) describes.

        Raises:
            UnsupportedModelError: another number of bits, or the order of another kernel.
            CheckpointError: a key has a senseless value.
        """
        keys = ("version", "checkpoint_format", "format")
        version = str(next((fields.data[key] for key in keys if fields.data.get(key)), "gemm")).lower()
        if version != "gemm":
            raise UnsupportedModelError(
                f"{fields.where}: the codes are in the order of AWQ's kernel {version!r}, and only that of gemm can be "
                "converted; give a checkpoint in that version, or the original one"
            )
        require_four_bits(fields, "bits" if "bits" in fields else "w_bit", "AWQ")
        key = "group_size" if "group_size" in fields else "q_group_size"
        return cls(None if fields.data.get(key) == -1 else fields.required_int(key))

    def shape(self, matrix: StoredMatrix) -> tuple[int, int]:
        words = matrix.parts["qweight"].shape
        if len(words) != 2:
            raise matrix.error("qweight", f"has shape {list(words)}, expected [in, out/8]")
        columns, rows = words[0], words[1] * 8
        matrix.expect("qweight", words, "I32")
        groups = -(-columns // self._group_size(matrix))
        matrix.expect("scales", (groups, rows), "F16", "BF16", "F32")
        matrix.expect("qzeros", (groups, words[1]), "I32")
        return rows, columns

    def grouping(self, matrix: StoredMatrix, read: ReadTensor) -> Grouping:
        zeros = _columns(read(matrix.parts["qzeros"]))
        symmetric = bool((zeros == SYMMETRIC_ZERO).all())
        return Grouping(self._group_size(matrix), matrix.parts["scales"].shape[0], None if symmetric else zeros)

    def read_codes(self, matrix: StoredMatrix, read: ReadTensor) -> Tensor:
        return _columns(read(matrix.parts["qweight"]))

    def read_scales(self, matrix: StoredMatrix, read: ReadTensor) -> Tensor:
        return read(matrix.parts["scales"]).T.contiguous()

    def _group_size(self, matrix: StoredMatrix) -> int:
        return self.group_size or max(1, matrix.parts["qweight"].shape[0])


def _columns(words: Tensor) -> Tensor:
    """The nibbles of int32 [rows, out/8] as uint8 [out, rows], outputs in their places."""
    return unpack_nibbles(words)[..., _NIBBLES].flatten(1).T.contiguous()
