"""Round-to-nearest INT4 codes for given scales."""

from __future__ import annotations

import torch
from torch import Tensor

#: Codes are stored with this offset: 0..15 stand for -8..7.
CODE_OFFSET = 8
LOWEST, HIGHEST = -8, 7


def rtn_int4(weight: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """Codes nearest to the weights: weight ≈ (code - 8) · scale of its group.

    Args:
        weight: float32 [out, in], `in` a multiple of `group_size`.
        scales: [out, in / group_size], already in their storage type, of either sign; 0 gives code 8 (zero).
        group_size: neighbouring weights of a row that share a scale.

    Returns:
        uint8 [out, in], values 0..15. Ties go to the even code; what lies outside -8..7 saturates.
    """
    divisor = nonzero_divisor(scales.to(torch.float32))
    levels: Tensor = (weight.unflatten(1, (-1, group_size)) / divisor[..., None]).round_().clamp_(LOWEST, HIGHEST)
    # The signed conversion is the vectorised one on a CPU; adding 8 first keeps the value in its range.
    return levels.add_(CODE_OFFSET).to(torch.int8).view(torch.uint8).flatten(1)


def nonzero_divisor(scales: Tensor) -> Tensor:
    """Scales with infinity in place of 0, so that a division by the scale of an all-zero group gives 0."""
    return torch.where(scales == 0, torch.inf, scales)
