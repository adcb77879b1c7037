"""Applies rotary position embedding to heads; the tables come from `fut_runtime.rope`."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the half-split pairs (d, d + head_dim/2) of x [tokens, heads, head_dim] by the tables of its tokens."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :].to(x.dtype), sin[:, None, :].to(x.dtype)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
