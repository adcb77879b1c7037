"""What the reader of a quantized checkpoint's format answers: which tensors make a matrix, and what the matrix is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fut_convert.errors import CheckpointError, UnsupportedModelError
from fut_convert.sources.base import TensorInfo
from fut_convert.sources.fields import Fields
from fut_convert.sources.grouped_codes import Grouping, Packing, dequantize, packing, regrouped

#: Reads a whole tensor of the checkpoint as it is stored.
ReadTensor = Callable[[TensorInfo], Tensor]


def require_four_bits(fields: Fields, key: str, family: str) -> None:
    """Raise UnsupportedModelError unless a quantization config has 4 bits under `key`; `family` names it."""
    bits = fields.required_int(key)
    if bits != 4:
        raise UnsupportedModelError(
            f"{fields.where}: the weights have {bits} bits; of {family}'s sizes only 4 bits can be converted; give a "
            "checkpoint in 4 bits, or the original one"
        )


@dataclass(frozen=True)
class StoredMatrix:
    """One quantized matrix.

    Attributes:
        name: name of its module, as `model.layers.0.self_attn.q_proj`.
        parts: last part of the name -> tensor, as `qweight`, `scales`.
    """

    name: str
    parts: Mapping[str, TensorInfo]

    @property
    def weight_name(self) -> str:
        """Name that the matrix has in a plain checkpoint."""
        return f"{self.name}.weight"

    def group_index(self, part: str, read: ReadTensor, size: int, count: int) -> Tensor | None:
        """Int64 [in], the group of each column; None where column k is in group k // size, as in static groups.

        -1 everywhere means that there is no order.

        Raises:
            CheckpointError: it names a group that does not exist.
        """
        if part not in self.parts:
            return None
        index = read(self.parts[part]).to(torch.int64)
        if torch.equal(index, torch.arange(len(index)) // size) or bool((index == -1).all()):
            return None
        if int(index.min()) < 0 or int(index.max()) >= count:
            raise self.error(
                part, f"names groups {int(index.min())} to {int(index.max())} of {count}; the file is damaged"
            )
        return index

    def error(self, part: str, problem: str) -> CheckpointError:
        """An error about one of its tensors."""
        return CheckpointError(f"{self.parts[part].file}: {self.name}.{part} {problem}")

    def expect(self, part: str, shape: tuple[int, ...], *dtypes: str) -> None:
        """Check type and shape of one of its tensors.

        Raises:
            CheckpointError: it has another one.
        """
        info = self.parts[part]
        if info.dtype not in dtypes or info.shape != shape:
            raise self.error(
                part, f"is {info.dtype} {list(info.shape)}, expected {' or '.join(dtypes)} {list(shape)}; "
                "config and weights do not belong together",
            )  # fmt: skip


class StoredFormat(ABC):
    """A quantized format, as one checkpoint's config sets it.

    Attributes:
        title: its usual name, for messages.
        required: last parts of the names of the tensors that every matrix has.
        optional: those that it may have.
    """

    title: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()

    def matrices(self, tensors: Mapping[str, TensorInfo]) -> list[StoredMatrix]:
        """The quantized matrices of a checkpoint, complete or not."""
        found: dict[str, dict[str, TensorInfo]] = {}
        for name, info in tensors.items():
            module, _, part = name.rpartition(".")
            if part in (*self.required, *self.optional):
                found.setdefault(module, {})[part] = info
        return [StoredMatrix(module, parts) for module, parts in found.items()]

    @abstractmethod
    def shape(self, matrix: StoredMatrix) -> tuple[int, int]:
        """(out, in) of a matrix that has all required parts.

        Raises:
            CheckpointError: its tensors have types or shapes that do not fit each other or the config.
        """

    @abstractmethod
    def packing(self, matrix: StoredMatrix, read: ReadTensor) -> Packing | None:
        """Whether its INT4 codes can be kept; None where it has none. Reads its small tensors.

        Raises:
            CheckpointError: they hold what they cannot.
        """

    @abstractmethod
    def weight(self, matrix: StoredMatrix, read: ReadTensor) -> Tensor:
        """The matrix dequantized, float32 [out, in].

        Raises:
            CheckpointError: its tensors hold what they cannot.
        """

    def codes(self, matrix: StoredMatrix, read: ReadTensor, size: int, columns: int) -> tuple[Tensor, Tensor]:
        """INT4 codes uint8 [out, columns] and scales [out, columns / size] of a matrix whose codes can be kept.

        Args:
            size: one of its `Packing.group_sizes`.
            columns: a multiple of it, and at least the matrix's columns; padding has code 8.
        """
        raise NotImplementedError(f"{self.title} holds no INT4 codes")


class GroupedFormat(StoredFormat):
    """A format with INT4 codes in groups. `name` is what the artifact records of kept codes, behind `packed:`."""

    name: str
    #: The part that holds the scales.
    scales_part: str

    @abstractmethod
    def grouping(self, matrix: StoredMatrix, read: ReadTensor) -> Grouping:
        """Its groups and zero points."""

    @abstractmethod
    def read_codes(self, matrix: StoredMatrix, read: ReadTensor) -> Tensor:
        """uint8 [out, in], values 0..15."""

    @abstractmethod
    def read_scales(self, matrix: StoredMatrix, read: ReadTensor) -> Tensor:
        """[out, groups] as stored."""

    def packing(self, matrix: StoredMatrix, read: ReadTensor) -> Packing:
        grouping = self.grouping(matrix, read)
        return packing(f"packed:{self.name}", grouping, self.shape(matrix)[1], matrix.parts[self.scales_part].dtype)

    def weight(self, matrix: StoredMatrix, read: ReadTensor) -> Tensor:
        return dequantize(self.read_codes(matrix, read), self._scales(matrix, read), self.grouping(matrix, read))

    def codes(self, matrix: StoredMatrix, read: ReadTensor, size: int, columns: int) -> tuple[Tensor, Tensor]:
        codes, scales = self.read_codes(matrix, read), self._scales(matrix, read)
        return regrouped(codes, scales, self.grouping(matrix, read), size, columns)

    def _scales(self, matrix: StoredMatrix, read: ReadTensor) -> Tensor:
        scales = self.read_scales(matrix, read)
        if bad := int((~torch.isfinite(scales)).sum()):
            raise matrix.error(
                self.scales_part, f"holds {bad} values that are not finite (NaN or infinity); the file is damaged: "
                "download it again and compare its checksum",
            )  # fmt: skip
        return scales
