"""Prefill's products as the kernels compute them, a fiber a thread, copies of tiles landing in random order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import gemm_checks
from emulation.conftest import OnTheHost
from fut_runtime.cuda import gemm
from fut_runtime.cuda.structs import Accumulation
from gemm_checks import BF16, TILES
from gemm_matrices import E4M3


@pytest.fixture(autouse=True)
def emulation(on_the_host: OnTheHost) -> Iterator[None]:
    """`fut_runtime.cuda.gemm` runs in the emulation."""
    with on_the_host(gemm, "fut_gemm"):
        yield


@pytest.mark.parametrize("dtype", [E4M3, BF16])
@pytest.mark.parametrize("tile", TILES)
def test_products_in_every_tile(dtype: torch.dtype, tile: tuple[int, int]) -> None:
    """Few rows; K of no whole stage; more stages than a ring has, and then more tiles than multiprocessors (five)."""
    for m, n, k in ((1, 7, 127), (257, 129, 40), (7, 700, 900), (130, 130, 600)):
        gemm_checks.check_store(m, n, k, dtype, tile)


def test_scales_and_bias() -> None:
    gemm_checks.check_scales(40, 150, 160, E4M3)


@pytest.mark.parametrize("accumulation", list(Accumulation))
def test_a_row_does_not_depend_on_its_company(accumulation: Accumulation) -> None:
    gemm_checks.check_company(140, 136, 400, accumulation)


@pytest.mark.parametrize("tile", TILES)
def test_residual(tile: tuple[int, int]) -> None:
    for m, n, k in ((130, 129, 160), (7, 300, 33), (7, 7, 7)):
        gemm_checks.check_residual(m, n, k, E4M3, tile)


@pytest.mark.parametrize("tile", TILES)
def test_swiglu(tile: tuple[int, int]) -> None:
    for m, channels, k in ((130, 70, 160), (3, 1, 64), (64, 127, 32)):
        gemm_checks.check_swiglu(m, channels, k, E4M3, tile)
        gemm_checks.check_swiglu_bf16(m, channels, k, BF16, tile)


def test_a_maximum_that_is_not_finite_is_recorded() -> None:
    gemm_checks.check_infinite_maximum()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_qkv(head_dim: int) -> None:
    for heads, kv_heads, tile, tokens, first in (
        (2, 1, (256, 1), [3, 70], [60, 63]),
        (3, 1, (128, 2), [90, 50], [0, 500]),
    ):
        gemm_checks.check_qkv(head_dim, E4M3, heads, kv_heads, tile, tokens, first)
