"""How much memory a device has left."""

from __future__ import annotations

import psutil
import torch


def free_bytes(device: torch.device) -> int:
    """Free bytes of the device's memory: the card's, or what the operating system calls available for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
