"""Memory of the card: how much is free, and taking some with an error that says what is missing."""

from __future__ import annotations

import torch
from torch import Tensor

from fut_runtime.errors import DeviceMemoryError


def free_bytes(device: torch.device) -> int:
    """Bytes that PyTorch could still hand out on a card: free ones, and those it holds but does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + int(torch.cuda.memory_reserved(device)) - int(torch.cuda.memory_allocated(device))


def size_text(nbytes: int) -> str:
    """Bytes for people: `12.3 GB`, `4.5 MB`."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def allocate(nbytes: int, device: torch.device, what: str, *, zero: bool = False) -> Tensor:
    """A block of device memory, uint8 [nbytes], from PyTorch's allocator.

    Raises:
        DeviceMemoryError: there is not as much left; the message names `what` and both sizes.
    """
    make = torch.zeros if zero else torch.empty
    try:
        return make(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"{what} need {size_text(nbytes)} on {device}, and {size_text(free_bytes(device))} are free"
        ) from error
