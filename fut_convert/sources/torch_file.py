"""One `pytorch_model*.bin`: a pickled state dict, read with `weights_only=True` always and memory-mapped."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from fut_convert.errors import CheckpointError, ReadError
from fut_convert.sources.base import STORED_DTYPES, Problem, TensorInfo

_DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in STORED_DTYPES.items()}

#: Bytes copied out of the mapping before it is made anew. Pages once touched count as resident memory until the
#: mapping goes, which would add up to the size of the file.
_REMAP_BYTES = 512 * 1024 * 1024


class TorchFile:
    """An open state dict.

    Attributes:
        name: its name within the checkpoint, for messages.
        tensors: what it holds.
        problems: none: a file that is too short cannot be opened at all.

    Raises:
        CheckpointError: not a state dict, truncated, or its pickle holds more than tensors.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self._path = path
        self._state: dict[str, Tensor] | None = None
        self._touched_bytes = 0
        self.tensors: dict[str, TensorInfo] = {
            tensor: TensorInfo(tensor, _dtype_name(value.dtype), tuple(value.shape), value.nbytes, name)
            for tensor, value in self._open().items()
        }
        self.problems: list[Problem] = []

    def read_rows(self, info: TensorInfo, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a tensor, [rows, ...] in its stored dtype, copied out of the mapping."""
        return self._copied(self._open()[info.name][start:stop])

    def read(self, info: TensorInfo) -> Tensor:
        """A whole tensor of any rank, see `read_rows`."""
        return self._copied(self._open()[info.name])

    def close(self) -> None:
        """Drop the mapping; it is made again when a tensor is read."""
        self._state = None
        self._touched_bytes = 0

    def _copied(self, mapped: Tensor) -> Tensor:
        copy = mapped.clone(memory_format=torch.contiguous_format)
        self._touched_bytes += copy.nbytes
        if self._touched_bytes > _REMAP_BYTES:
            self.close()
        return copy

    def _open(self) -> dict[str, Tensor]:
        if self._state is None:
            self._state = self._load()
        return self._state

    def _load(self) -> dict[str, Tensor]:
        try:
            # The format before 1.6 is one pickle, which cannot be mapped; such files are small.
            mappable = zipfile.is_zipfile(self._path)
            state = torch.load(self._path, map_location="cpu", weights_only=True, mmap=mappable)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{self.name}: refused, its pickle holds more than tensors or is damaged; pickles can run code, so "
                "only tensors are read (weights_only=True). Convert it to safetensors where you trust it"
            ) from error
        except OSError as error:
            raise ReadError(f"{self.name}: cannot be read ({error.strerror or error})") from error
        except Exception as error:  # a damaged pickle makes the unpickler fail in any way
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise CheckpointError(
                f"{self.name}: cannot be read as a PyTorch state dict, truncated or damaged ({reason}); "
                "download the file again"
            ) from error
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise CheckpointError(f"{self.name}: not a plain state dict of tensors, perhaps a training checkpoint")
        return {str(name): value for name, value in state.items()}


def _dtype_name(dtype: torch.dtype) -> str:
    return _DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")
