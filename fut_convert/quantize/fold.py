"""Folding an RMSNorm's gain into the projection that follows it."""

from __future__ import annotations

import torch
from torch import Tensor


def fold_gain(weight: Tensor, gain: Tensor) -> Tensor:
    """W · diag(gain) in FP32, before anything is rounded.

    (x̂ ⊙ gain) Wᵀ = x̂ (W · diag(gain))ᵀ, so the normalised activation x̂ needs no gain at run time.

    Args:
        weight: [out, in], any floating type.
        gain: [in], any floating type.

    Returns:
        float32 [out, in].
    """
    return weight.to(torch.float32) * gain.to(torch.float32)
