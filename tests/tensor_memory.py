"""How many bytes of tensors live at once while code runs, counted as a CUDA allocator would, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """While active, counts the storages that operations make.

    Attributes:
        now: bytes alive.
        peak: most bytes alive so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, function: Callable[..., Any], _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {_storage(t)._cdata for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = _storage(tensor)
                if storage._cdata not in given and storage._cdata not in self._sizes:
                    self._count(storage)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        self._sizes[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
