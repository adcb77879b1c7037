"""Operands of prefill's products in poisoned memory, and the products in FP64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
_device = "cuda"


def device() -> str:
    """Where tensors are made: a card, unless `emulated` is in force."""
    return _device


@contextmanager
def emulated() -> Iterator[None]:
    """Tensors lie on the CPU, where the emulation runs the kernels."""
    global _device  # noqa: PLW0603
    _device = "cpu"
    try:
        yield
    finally:
        _device = "cuda"


def poisoned(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """NaN [rows, columns], its rows a multiple of 16 bytes apart and NaN between and below them."""
    step = 16 // dtype.itemsize
    stride = -(-columns // step) * step + step
    whole = torch.empty(rows + 2, stride, dtype=dtype, device=device())
    # E4M3 has one NaN, 0x7f; FF in every byte is one of the others'.
    whole.view(torch.uint8).fill_(0x7F if dtype == E4M3 else 0xFF)
    return whole[:rows, :columns]


def untouched(matrix: Tensor) -> bool:
    """Whether all that lies between and below the rows of a `poisoned` matrix is still NaN."""
    base = matrix._base
    assert base is not None
    outside = torch.ones(base.shape, dtype=torch.bool, device=device())
    outside[: matrix.shape[0], : matrix.shape[1]] = False
    return bool(base.float().isnan()[outside].all())


def operand(rows: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random numbers of about one in poisoned memory, with a channel of outliers."""
    generator = torch.Generator(device()).manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, device=device())
    x[:, columns // 3] *= 20
    out = poisoned(rows, columns, dtype)
    out.copy_(x.clamp(-448, 448))
    return out


def vector(size: int, seed: int) -> Tensor:
    """Positive factors, F32 [size]."""
    generator = torch.Generator(device()).manual_seed(seed)
    return torch.rand(size, generator=generator, device=device()) + 0.25


@dataclass(frozen=True)
class Product:
    """A product of random operands: `sum` is A B^T in FP64."""

    a: Tensor
    b: Tensor

    @classmethod
    def random(cls, m: int, n: int, k: int, dtype: torch.dtype) -> Product:
        return cls(operand(m, k, dtype, m + k), operand(n, k, dtype, 100003 + n + k))

    @property
    def sum(self) -> Tensor:
        return self.a.double() @ self.b.double().T

    @property
    def magnitude(self) -> Tensor:
        """What errors of the sums are measured by: |A| |B|^T."""
        return self.a.double().abs() @ self.b.double().abs().T


def close(found: Tensor, expected: Tensor, allowed: Tensor) -> bool:
    """Whether every element is within what is allowed it."""
    return bool(((found.double() - expected).abs() <= allowed).all())


def relative(found: Tensor, expected: Tensor) -> float:
    """The worst row's error over its length; infinite where something is not finite."""
    error = (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    return float(error.max()) if bool(found.double().isfinite().all()) else float("inf")
