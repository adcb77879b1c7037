"""Prefill's products on the card against FP64 on awkward sizes, in memory that is NaN wherever they must not look."""

from __future__ import annotations

import pytest
import torch

import gemm_checks
from fut_runtime.cuda import gemm
from fut_runtime.cuda.library import CudaCallError
from fut_runtime.cuda.structs import Accumulation
from gemm_checks import BF16, BF16_TOLERANCE, TILES, tolerance, tuning
from gemm_matrices import E4M3, Product, close, device, operand, poisoned

pytestmark = pytest.mark.usefixtures("built")

SIZES = [1, 7, 127, 129, 576, 1568]


@pytest.mark.parametrize("dtype", [E4M3, BF16])
@pytest.mark.parametrize("tile", TILES)
def test_awkward_sizes_in_every_tile(dtype: torch.dtype, tile: tuple[int, int]) -> None:
    """Each size of m with each of n, k going round."""
    for i, m in enumerate(SIZES):
        for j, n in enumerate(SIZES):
            gemm_checks.check_store(m, n, SIZES[(i + 2 * j) % len(SIZES)], dtype, tile)


@pytest.mark.parametrize("dtype", [E4M3, BF16])
def test_scales_and_bias(dtype: torch.dtype) -> None:
    gemm_checks.check_scales(300, 1000, 960, dtype)


def test_promoted_sums_are_more_accurate() -> None:
    product = Product.random(256, 256, 14336, E4M3)
    errors = []
    for accumulation in Accumulation:
        out = poisoned(256, 256, torch.float32)
        gemm.store(product.a, product.b, out, tuning=tuning(accumulation))
        errors.append(float((out.double() - product.sum).norm() / product.sum.norm()))
    print(f"relative error of sums over 14336: fast {errors[0]:.2e}, promoted {errors[1]:.2e}")
    assert errors[1] < errors[0] / 4


@pytest.mark.parametrize("accumulation", list(Accumulation))
def test_a_row_does_not_depend_on_its_company(accumulation: Accumulation) -> None:
    gemm_checks.check_company(700, 640, 1568, accumulation)


def test_large_products_in_every_order_of_tiles() -> None:
    """More tiles than the card has multiprocessors, and rows of tiles that fill no group."""
    for m, n, k in ((2048, 6144, 4096), (4500, 2500, 512), (16, 20000, 512), (20000, 100, 256)):
        product = Product.random(m, n, k, E4M3)
        out = poisoned(m, n, BF16)
        gemm.store(product.a, product.b, out)
        allowed = product.magnitude * tolerance(E4M3, Accumulation.FAST) + product.sum.abs() * BF16_TOLERANCE
        assert close(out, product.sum, allowed), (m, n, k)


@pytest.mark.parametrize("dtype", [E4M3, BF16])
@pytest.mark.parametrize("tile", TILES)
def test_residual(dtype: torch.dtype, tile: tuple[int, int]) -> None:
    for m, n, k in ((1, 576, 1536), (129, 576, 127), (200, 1000, 640), (130, 129, 1568), (7, 7, 7)):
        gemm_checks.check_residual(m, n, k, dtype, tile)


@pytest.mark.parametrize("dtype", [E4M3, BF16])
@pytest.mark.parametrize("tile", TILES)
def test_swiglu(dtype: torch.dtype, tile: tuple[int, int]) -> None:
    for m, channels, k in ((1, 1536, 576), (129, 1568, 127), (200, 72, 960), (300, 1, 64), (64, 127, 256)):
        gemm_checks.check_swiglu(m, channels, k, dtype, tile)
        gemm_checks.check_swiglu_bf16(m, channels, k, dtype, tile)


def test_a_maximum_that_is_not_finite_is_recorded() -> None:
    gemm_checks.check_infinite_maximum()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("dtype", [E4M3, BF16])
def test_qkv(head_dim: int, dtype: torch.dtype) -> None:
    for heads, kv_heads, tile in ((6, 2, (256, 2)), (5, 5, (128, 1)), (7, 1, (0, 0))):
        for tokens, first in (([1], [0]), ([90, 200], [30, 0]), ([3, 70, 64], [500, 63, 64])):
            gemm_checks.check_qkv(head_dim, dtype, heads, kv_heads, tile, tokens, first)


def test_what_the_copy_engine_cannot_read_is_refused() -> None:
    a, b = operand(4, 64, E4M3, 1), operand(8, 64, E4M3, 2)
    out = poisoned(4, 8, BF16)
    with pytest.raises(CudaCallError, match=r"A \[4, 63\]: its address is .*, expected a multiple of 16 bytes"):
        gemm.store(a[:, 1:], b[:, 1:], out)
    odd = torch.zeros(8, 72, device=device()).to(E4M3)[:, :64]
    with pytest.raises(CudaCallError, match=r"B \[8, 64\]: its stride between rows is 72, expected a multiple of 16"):
        gemm.store(a, odd, out)
    with pytest.raises(CudaCallError, match=r"the output \[4, 8\]: its stride between rows is 20, expected a multiple"):
        gemm.store(a, b, torch.zeros(4, 10, dtype=BF16, device=device())[:, :8])
