"""The quantized matrices of a checkpoint, under the names that they have in a plain one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fut_convert.errors import CheckpointError
from fut_convert.sources.base import Problem, TensorInfo
from fut_convert.sources.grouped_codes import Packing
from fut_convert.sources.stored_format import ReadTensor, StoredFormat, StoredMatrix


class QuantizedMatrices:
    """Dequantizes matrices, or hands out their codes.

    Attributes:
        format: the format they are in.
        tensors: every tensor of the checkpoint as a plain one would list it: each matrix in place of its parts.
        problems: matrices that lack a part, or whose parts do not fit together.
        broken: names of the matrices that `problems` are about.
    """

    def __init__(self, stored: StoredFormat, tensors: Mapping[str, TensorInfo], read: ReadTensor, where: str) -> None:
        """Find them among the tensors of the files; `where` names the checkpoint in messages."""
        self.format = stored
        self.tensors = dict(tensors)
        self.problems: list[Problem] = []
        self.broken: set[str] = set()
        self._read = read
        self._matrices: dict[str, StoredMatrix] = {}
        self._packings: dict[str, Packing | None] = {}
        for matrix in stored.matrices(tensors):
            for info in matrix.parts.values():
                del self.tensors[info.name]
            self._add(matrix)
        if not self._matrices and not self.problems:
            self.problems.append(
                Problem(
                    "warning",
                    f"{where}: its config says that matrices are quantized ({stored.title}), but none of them is; they "
                    "are read as they are",
                )
            )

    @property
    def names(self) -> frozenset[str]:
        """Names of the matrices that can be loaded, as in `tensors`."""
        return frozenset(self._matrices)

    def check(self) -> list[Problem]:
        """What is wrong with the zero points and the order of the groups of each matrix, which are read for it."""
        problems = []
        for name in self._matrices:
            try:
                self.packing(name)
            except CheckpointError as error:
                problems.append(Problem("error", str(error)))
        return problems

    def packing(self, name: str) -> Packing | None:
        """Whether the codes of a matrix can be kept, see `StoredFormat.packing`."""
        if name not in self._packings:
            self._packings[name] = self.format.packing(self._matrices[name], self._read)
        return self._packings[name]

    def weight(self, name: str) -> Tensor:
        """A matrix dequantized, float32 [out, in]."""
        return self.format.weight(self._matrices[name], self._read)

    def codes(self, name: str, group_size: int, columns: int) -> tuple[Tensor, Tensor]:
        """Codes and scales of a matrix, see `StoredFormat.codes`."""
        return self.format.codes(self._matrices[name], self._read, group_size, columns)

    def zero_bias(self, info: TensorInfo) -> bool:
        """Whether a tensor is a bias of zeros beside a quantized matrix: AutoGPTQ gives one to each."""
        module, _, part = info.name.rpartition(".")
        return part == "bias" and f"{module}.weight" in self._matrices and not bool(self._read(info).any())

    def _add(self, matrix: StoredMatrix) -> None:
        name = matrix.weight_name
        files = ", ".join(sorted({info.file for info in matrix.parts.values()}))
        try:
            if name in self.tensors:
                raise CheckpointError(f"{files}: {matrix.name} is there twice, quantized and as {name}")
            if missing := [part for part in self.format.required if part not in matrix.parts]:
                present = ", ".join(sorted(matrix.parts))
                raise CheckpointError(
                    f"{files}: {matrix.name} has {present}, but {' and '.join(missing)} of a matrix in "
                    f"{self.format.title} is missing; the checkpoint is incomplete"
                )
            shape = self.format.shape(matrix)
        except CheckpointError as error:
            self.problems.append(Problem("error", str(error)))
            self.broken.add(name)
            return
        size = sum(info.nbytes for info in matrix.parts.values())
        first = matrix.parts[self.format.required[0]].file
        self.tensors[name] = TensorInfo(name, self.format.title, shape, size, first)
        self._matrices[name] = matrix
