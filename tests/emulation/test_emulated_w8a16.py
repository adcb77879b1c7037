"""Products of E4M3 weights with 16-bit activations as the kernel computes them, a fiber a thread."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import gemm_matrices
from fut_runtime.cuda import w8a16
from fut_runtime.cuda.library import Library
from fut_runtime.cuda.structs import W8A16Call
from w8a16_checks import check_product


@pytest.fixture(autouse=True)
def on_the_host(emulated: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`fut_runtime.cuda.w8a16` runs in the emulation, on tensors of the CPU."""

    def run(call: W8A16Call, a: Tensor) -> None:
        emulated.call("fut_w8a16", ctypes.byref(call), None)

    def check(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], name: str, *, dense: bool = False) -> None:
        assert tensor.dtype == dtype and tuple(tensor.shape) == shape, name

    monkeypatch.setattr(w8a16, "_run", run)
    monkeypatch.setattr(w8a16, "check_matrix", check)
    with gemm_matrices.emulated():
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("channels", "tokens", "splits"),
    [
        *((128, 16, 1), (128, 16, 3), (128, 32, 2), (128, 64, 1), (128, 128, 2), (128, 256, 1)),
        *((64, 16, 1), (64, 16, 3), (64, 32, 1), (64, 64, 2)),
    ],
)
def test_products(dtype: torch.dtype, channels: int, tokens: int, splits: int) -> None:
    """Few and many tokens, channels and k of no whole tile, more tiles than multiprocessors, stages round the ring."""
    for m, n, k in ((1, 7, 321), (tokens + 3, 129, 400), (tokens, 700, 322), (5, 128, 1300)):
        check_product(m, n, k, dtype, channels, tokens, splits)
