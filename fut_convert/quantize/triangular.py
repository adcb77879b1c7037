"""The inverse of a triangular matrix in the memory of the matrix itself."""

from __future__ import annotations

import torch
from torch import Tensor

#: Up to this size LAPACK's solver inverts, beyond it matrix products.
_LEAF = 512


def invert_lower(lower: Tensor) -> None:
    """Replace a lower triangular matrix [n, n] by its inverse; what stands above the diagonal must be zero.

    [[A, 0], [B, C]]⁻¹ = [[A⁻¹, 0], [-C⁻¹BA⁻¹, C⁻¹]], again and again for A and C: matrix products for two thirds of the
    work of solving for the identity, with a quarter of the matrix's memory beside it instead of two or three of it.
    """
    size = len(lower)
    if size <= _LEAF:
        identity = torch.eye(size, dtype=lower.dtype, device=lower.device)
        lower.copy_(torch.linalg.solve_triangular(lower, identity, upper=False))
        return
    half = size // 2
    first, below, second = lower[:half, :half], lower[half:, :half], lower[half:, half:]
    invert_lower(first)
    invert_lower(second)
    below.copy_((second @ below).neg_() @ first)
