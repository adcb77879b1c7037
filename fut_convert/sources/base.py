"""What every checkpoint format looks like to the converter: a model specification and named tensors.

A source reads one tensor, or some rows of one, at a time, so that memory stays bounded whatever the checkpoint's size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fut_convert.errors import CheckpointError
from fut_convert.sources.grouped_codes import Packing
from fut_convert.sources.names import EMBEDDING, HEAD, expected_tensors
from fut_convert.sources.quantized import quantized_tensors
from fut_convert.sources.read_errors import read_errors
from fut_runtime.artifact.spec import ModelSpec

if TYPE_CHECKING:
    from fut_convert.reading_order import ReadingOrder
    from fut_convert.sources.stream_plan import StreamPlan

#: A side file: its name relative to the artifact, and where it is, or its bytes when the source makes it up.
SideFile = tuple[str, Path | bytes]

#: Element types a checkpoint's weights may have, by their safetensors names.
FLOAT_DTYPES: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: All that files are read in: those, and what quantized weights are stored in.
STORED_DTYPES: dict[str, torch.dtype] = {
    **FLOAT_DTYPES,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
}

#: Rows compared at a time when a tied checkpoint also stores its head.
_COMPARE_ROWS = 4096


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as the checkpoint stores it.

    Attributes:
        name: Hugging Face name.
        dtype: stored type, by its safetensors name (`BF16`), or its GGUF name (`Q4_1`) in a GGUF file.
        shape: shape that `load` returns.
        nbytes: bytes in the file.
        file: name of the file it is in, relative to the checkpoint.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str


@dataclass(frozen=True)
class Problem:
    """Something `Source.check` found. An `error` forbids the conversion, a `warning` is shown and no more.

    `message` is complete by itself: it names file, tensor, what was found, what was expected and the remedy.
    """

    severity: str
    message: str

    def __str__(self) -> str:
        return self.message


class Source(ABC):
    """An open checkpoint.

    Attributes:
        identity: where it came from, without any path: `kind`, and what identifies it within its kind.
        spec: the model it holds.
        dtype: stored type of most of its bytes, named as in TensorInfo.
        tensors: every tensor it can load, by Hugging Face name; a quantized matrix under the name it has in a plain
            checkpoint.
        location: the file or directory it is read from.
        quantized: names of the matrices that are dequantized, each as a whole, when they are loaded.
    """

    location: Path
    quantized: frozenset[str] = frozenset()

    #: Stored types that `load` understands.
    readable_dtypes: frozenset[str] = frozenset(FLOAT_DTYPES)

    def __init__(self, identity: dict[str, Any], spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> None:
        self.identity = identity
        self.spec = spec
        self.tensors = tensors

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def weight_files(self) -> list[str]:
        """Names of the files that tensors are read from, sorted."""
        return sorted({info.file for info in self.tensors.values()})

    @property
    def dtype(self) -> str:
        """Stored type that holds most of the bytes; BF16 where there is no tensor."""
        sizes: dict[str, int] = {}
        for info in self.tensors.values():
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
        return max(sizes, key=lambda d: sizes[d], default="BF16")

    def load(self, name: str) -> Tensor:
        """One whole tensor, on the CPU, in memory of its own.

        Its dtype is the stored one; float32 where the file holds it quantized.

        Raises:
            CheckpointError: there is no such tensor, its file ends too early, or a value is not finite.
        """
        return self.load_rows(name, 0, self._info(name).shape[0])

    def load_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` (exclusive) of a tensor: of a vocabulary matrix, a tile at a time.

        Raises:
            CheckpointError: as `load`.
            ValueError: the rows lie outside the tensor.
        """
        info = self._info(name)
        if not 0 <= start <= stop <= info.shape[0]:
            raise ValueError(f"{name}: rows {start}:{stop} lie outside {info.shape}")
        tensor = self._read_rows(info, start, stop)
        # A sum is finite only if all its terms are: one cheap pass, and a second one where it leaves a doubt.
        if not bool(torch.isfinite(tensor.sum())) and (bad := int((~torch.isfinite(tensor)).sum())):
            first = start + int((~torch.isfinite(tensor)).nonzero()[0][0])
            raise CheckpointError(
                f"{info.file}: {name} holds {bad} values that are not finite (NaN or infinity), the first in row "
                f"{first}; the file is damaged or the model diverged in training: download it again and compare its "
                "checksum"
            )
        return tensor

    def packing(self, name: str) -> Packing | None:
        """Whether the INT4 codes that a matrix is stored in can be kept; None where it is stored otherwise.

        Raises:
            CheckpointError: its zero points or groups cannot be read.
        """
        return None

    def load_codes(self, name: str, group_size: int, columns: int) -> tuple[Tensor, Tensor]:
        """Codes and scales of a matrix whose `packing` has no obstacle, see `StoredFormat.codes`.

        Raises:
            CheckpointError: as `load`.
        """
        raise NotImplementedError(f"{name} is not stored in INT4 codes that can be kept")

    def check(self) -> list[Problem]:
        """Compare what the files hold with what the config promises, reading no weights but a duplicated tied head.

        Of quantized matrices it reads the zero points and the order of the groups.

        Finds truncated files, quantized formats, missing and unexpected tensors, wrong shapes and types, and a head
        that differs from the embedding it is said to be tied to.
        """
        quantized = quantized_tensors(self.tensors.values())
        if quantized is not None:
            return [Problem("error", quantized)]
        problems = self._file_problems()
        expected = expected_tensors(self.spec)
        for name, shape in expected.items():
            info = self.tensors.get(name)
            if info is None:
                if name not in self._reported():
                    problems.append(Problem("error", self._missing(name, shape)))
            elif info.dtype not in self.readable_dtypes:
                allowed = ", ".join(sorted(self.readable_dtypes))
                problems.append(
                    Problem("error", f"{info.file}: {name} is stored as {info.dtype}; readable are {allowed}")
                )
            elif info.shape != shape:
                problems.append(Problem("error", self._wrong_shape(info, shape)))
        for name, info in self.tensors.items():
            if name in expected or self._is_harmless(info):
                continue
            if name == HEAD and self.spec.tie_word_embeddings:
                problems.extend(self._check_tied_head(info))
            else:
                problems.append(Problem("error", self._unexpected(info)))
        return problems

    def _weight_paths(self) -> Iterable[tuple[str, Path]]:
        """The files on the disk that weights are read from, by name."""
        return ((name, self.location / name) for name in self.weight_files)

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self._where}: no tensor {name}")
        return info

    @property
    def _where(self) -> str:
        return str(self.identity.get("id") or self.identity.get("name"))

    def _missing(self, name: str, shape: tuple[int, ...]) -> str:
        message = f"{self._where}: {name} {list(shape)} is missing"
        if name == HEAD:
            return (
                f"{message}, and the config says tie_word_embeddings is false; "
                "set it to true if the model reuses its embedding, else download the missing file"
            )
        return f"{message}; the checkpoint is incomplete, or its config describes another model"

    def _wrong_shape(self, info: TensorInfo, shape: tuple[int, ...]) -> str:
        message = f"{info.file}: {info.name} has shape {list(info.shape)}, but the config makes it {list(shape)}"
        if info.name in (EMBEDDING, HEAD) and info.shape[1:] == shape[1:]:
            message += f" (vocab_size {self.spec.vocab_size}, {info.shape[0]} rows in the file)"
        return f"{message}; config and weights do not belong together"

    def _unexpected(self, info: TensorInfo) -> str:
        message = f"{info.file}: {info.name} {list(info.shape)} has no place in {self.spec.architecture}"
        if info.name.endswith(".bias"):
            return f"{message} with this config, which asks for no such bias (attention_bias, mlp_bias)"
        return f"{message} with {self.spec.num_layers} layers; leaving it out would change what the model computes"

    def _check_tied_head(self, head: TensorInfo) -> list[Problem]:
        """A tied checkpoint may store its head once more; that is harmless as long as it is the same matrix."""
        embedding = self.tensors.get(EMBEDDING)
        if embedding is None:
            return []
        equal = head.shape == embedding.shape and all(
            torch.equal(
                self.load_rows(HEAD, row, min(row + _COMPARE_ROWS, head.shape[0])).float(),
                self.load_rows(EMBEDDING, row, min(row + _COMPARE_ROWS, head.shape[0])).float(),
            )
            for row in range(0, head.shape[0], _COMPARE_ROWS)
        )
        if equal:
            return []
        return [
            Problem(
                "error",
                f"{head.file}: the config says tie_word_embeddings, but {HEAD} differs from {EMBEDDING}; "
                "set tie_word_embeddings to false in config.json if the head is meant, else remove it",
            )
        ]

    def _reported(self) -> Collection[str]:
        """Names of tensors that cannot be loaded for a reason that `_file_problems` gives."""
        return ()

    def _is_harmless(self, info: TensorInfo) -> bool:
        """Whether a tensor can be ignored.

        Rotary frequencies, which old checkpoints stored, are in the config; scales of K and V belong to an FP8 cache.
        """
        return info.name.endswith(("rotary_emb.inv_freq", "self_attn.k_scale", "self_attn.v_scale"))

    @abstractmethod
    def _read_rows(self, info: TensorInfo, start: int, stop: int) -> Tensor:
        """Rows of a tensor, in memory of their own."""

    @abstractmethod
    def _file_problems(self) -> list[Problem]:
        """What is wrong with the files themselves, before any tensor is looked at."""

    def file_stamps(self) -> dict[str, list[int]]:
        """Size of every file that is read, and when it was changed unless a commit says what it holds.

        Raises:
            ReadError: a file is gone.
        """
        paths = dict(self._weight_paths())
        paths |= {name: content for name, content in self.side_files() if isinstance(content, Path)}
        with read_errors(self._where):
            found = {name: path.stat() for name, path in paths.items()}
        pinned = "commit" in self.identity
        return {name: [s.st_size] if pinned else [s.st_size, s.st_mtime_ns] for name, s in found.items()}

    def stream_plan(self, order: ReadingOrder) -> StreamPlan | None:
        """How the weights come while they are converted; None where they are here."""
        return None

    def bytes_to_come(self, place: Path | None = None) -> int:
        """Bytes of weights that have yet to be fetched before the conversion: to the disk of `place`, or to any."""
        return 0

    def begin(self, order: ReadingOrder, directory: Path, step: int) -> None:
        """Be ready for the steps from `step` on; weights that come meanwhile are kept in `directory`.

        Raises:
            ArtifactError: it cannot be used.
        """
        return None

    def enter(self, step: int) -> None:
        """Be ready to read what a step reads, and let go what only those before it have read.

        Raises:
            HubError, ReadError, ArtifactError: what it reads cannot be fetched or kept.
        """
        return None

    @abstractmethod
    def side_files(self) -> list[SideFile]:
        """Every file that is not weights, to be copied byte for byte, sorted by name."""

    @abstractmethod
    def close(self) -> None:
        """Release the files; the source cannot be read afterwards."""

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
