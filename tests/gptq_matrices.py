"""Weights and Hessians that tests of GPTQ share, and the error that it makes small."""

from __future__ import annotations

import torch
from torch import Tensor

from fut_runtime.artifact.fragment import dequantize_int4


def correlated_hessian(columns: int, seed: int, *, spread: float = 1.0, samples: int = 0) -> Tensor:
    """FP64 mean of xxᵀ over correlated inputs whose channels differ in size."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator, dtype=torch.float64) / columns**0.5
    mixing += torch.eye(columns)
    x = torch.randn(samples or 8 * columns, columns, generator=generator, dtype=torch.float64) @ mixing
    x *= (spread * torch.randn(columns, generator=generator, dtype=torch.float64)).exp()
    return x.T @ x / len(x)


def random_weight(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def relative_error(weight: Tensor, codes: Tensor, scales: Tensor, hessian: Tensor) -> float:
    """tr((W - Ŵ) H (W - Ŵ)ᵀ) / tr(W H Wᵀ), written as it stands."""
    lost = weight.double() - dequantize_int4(codes, scales).double()
    return float((lost @ hessian @ lost.T).trace() / (weight.double() @ hessian @ weight.double().T).trace())


def shifted(hessian: Tensor, share: float) -> Tensor:
    """The same with its smallest eigenvalue at -share of the diagonal's mean."""
    values = torch.linalg.eigvalsh(hessian)
    identity = torch.eye(len(hessian), dtype=torch.float64)
    found = hessian - values[0] * identity
    # The shift changes the mean itself: mean' = mean - s, s = share · mean'.
    return found - identity * (share / (1 + share) * found.diagonal().mean())
