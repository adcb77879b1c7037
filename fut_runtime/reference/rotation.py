"""Block-diagonal Hadamard rotation of heads, which spreads outlier channels before the cache is quantised.

Source: QuaRot (Ashkboos et al. 2024, section 4), inside head_dim only: q and k turn alike, so their products stay.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sylvester_hadamard(n: int) -> Tensor:
    """Sylvester's Hadamard matrix of order n, a power of two: int8 [n, n] of ±1, symmetric, H @ H = n * I.

    Raises:
        ValueError: n is not a power of two.
    """
    if n < 1 or n & (n - 1):
        raise ValueError(f"a Sylvester Hadamard matrix has an order that is a power of two, not {n}")
    index = torch.arange(n)
    parity = torch.zeros(n, n, dtype=torch.int64)
    common = index[:, None] & index[None, :]
    while bool(common.any()):
        parity ^= common & 1
        common = common >> 1
    return (1 - 2 * parity).to(torch.int8)


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """Rotate the last axis in blocks: [..., d] times diag(H, H, …) / sqrt(n), with `signs` = H int8 [n, n].

    The rotation is orthogonal and symmetric, so applying it twice gives x back (up to rounding).
    """
    block = signs.shape[0]
    matrix = signs.to(x.dtype) / block**0.5
    rotated: Tensor = x.unflatten(-1, (-1, block)) @ matrix
    return rotated.flatten(-2)
