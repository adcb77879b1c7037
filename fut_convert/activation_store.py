"""Activations of all calibration windows, kept where there is room: on the device, in host memory, or in a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from fut_runtime.artifact.staging import os_errors
from fut_runtime.reference.numerics import ACTIVATION_DTYPE

#: Where activations may lie, the fastest first.
PLACES: tuple[str, ...] = ("device", "host", "disk")
#: Bytes that are copied at once to or from a file.
_CHUNK_BYTES = 64 << 20


class ActivationStore:
    """BF16 activations [windows, tokens, channels], read and written some windows at a time."""

    def __init__(
        self, shape: tuple[int, int, int], device: torch.device, place: str = "device", path: Path | None = None
    ) -> None:
        """Make room for activations; what they are at first is undefined.

        Args:
            shape: windows, tokens, channels.
            device: where `load` puts them.
            place: one of PLACES; `host` is memory that the device copies from and to directly.
            path: the file of `disk`, made anew.

        Raises:
            ArtifactError: the file cannot be made.
        """
        self.shape = shape
        self.place = place
        self._device = device
        self._tensor: Tensor | None = None
        self._registered = False
        self._descriptor = -1
        self._path = path
        if place == "disk":
            if path is None:
                raise ValueError("activations on the disk need the path of a file")
            with os_errors(path, "cannot be made"):
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        else:
            where = device if place == "device" else torch.device("cpu")
            self._tensor = torch.empty(shape, dtype=ACTIVATION_DTYPE, device=where)
            if place == "host" and device.type == "cuda":
                # PyTorch's own pinned memory would round gigabytes up to a power of two. Where the system refuses to
                # pin so much, copies are slower and no more.
                self._registered = (
                    int(torch.cuda.cudart().cudaHostRegister(self._tensor.data_ptr(), self.nbytes, 0)) == 0
                )

    @property
    def nbytes(self) -> int:
        """Size of all of them."""
        windows, tokens, channels = self.shape
        return ACTIVATION_DTYPE.itemsize * windows * tokens * channels

    def load(self, windows: slice) -> Tensor:
        """Those of some windows, [n, tokens, channels] on the device: maybe a view, so not to be changed."""
        if self._tensor is not None:
            return self._tensor[windows].to(self._device)
        part = torch.empty((windows.stop - windows.start, *self.shape[1:]), dtype=ACTIVATION_DTYPE)
        self._transfer(part, windows.start, write=False)
        return part.to(self._device)

    def store(self, windows: slice, values: Tensor) -> None:
        """Put those of some windows, of any shape with as many numbers, rounded to BF16.

        Raises:
            ArtifactError: the disk refuses.
        """
        values = values.view(-1, *self.shape[1:])
        if self._tensor is not None:
            self._tensor[windows].copy_(values)
        else:
            self._transfer(values.to("cpu", ACTIVATION_DTYPE).contiguous(), windows.start, write=True)

    def parts(self, windows: slice) -> Iterator[Tensor]:
        """Those of some windows in order, a few windows [n, tokens, channels] at a time, in host memory."""
        step = max(1, _CHUNK_BYTES * self.shape[0] // max(1, self.nbytes))
        for first in range(windows.start, windows.stop, step):
            yield self.load(slice(first, min(first + step, windows.stop))).cpu()

    def restore(self, path: Path, places: Iterable[tuple[slice, slice]]) -> None:
        """Take them from a file that holds the windows of all processes, one after another.

        Args:
            path: the file.
            places: which windows of the file are which of these.

        Raises:
            ArtifactError: the file cannot be read or is too short.
        """
        window_bytes = self.nbytes // max(1, self.shape[0])
        with os_errors(path, "cannot be read"), path.open("rb") as file:
            for there, here in places:
                file.seek(there.start * window_bytes)
                for window in range(here.start, here.stop):
                    part = torch.empty((1, *self.shape[1:]), dtype=ACTIVATION_DTYPE)
                    if file.readinto(_bytes(part)) != part.nbytes:
                        raise OSError(f"ends before byte {there.stop * window_bytes}")
                    self.store(slice(window, window + 1), part)

    def close(self) -> None:
        """Give the room back; does nothing the second time."""
        if self._registered and self._tensor is not None:
            torch.cuda.cudart().cudaHostUnregister(self._tensor.data_ptr())
        self._tensor = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            if self._path is not None:
                self._path.unlink(missing_ok=True)

    def _transfer(self, part: Tensor, first: int, *, write: bool) -> None:
        data, offset = _bytes(part), first * self.nbytes // self.shape[0]
        with os_errors(self._path or Path(), "cannot be written" if write else "cannot be read"):
            while data:
                if write:
                    count = os.pwrite(self._descriptor, data[:_CHUNK_BYTES], offset)
                elif (count := os.preadv(self._descriptor, [data[:_CHUNK_BYTES]], offset)) == 0:
                    raise OSError(f"ends at byte {offset}")
                data, offset = data[count:], offset + count


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory."""
    data: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return data
