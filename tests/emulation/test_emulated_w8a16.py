"""Products of E4M3 weights with 16-bit activations as the kernel computes them, a fiber a thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from emulation.conftest import OnTheHost
from fut_runtime.cuda import w8a16
from w8a16_checks import check_product


@pytest.fixture(autouse=True)
def emulation(on_the_host: OnTheHost) -> Iterator[None]:
    """`fut_runtime.cuda.w8a16` runs in the emulation."""
    with on_the_host(w8a16, "fut_w8a16"):
        yield


@pytest.mark.parametrize(
    ("dtype", "channels", "tokens", "splits"),
    [
        *((torch.bfloat16, 128, *tile) for tile in ((16, 3), (32, 2), (64, 1), (128, 2), (256, 1))),
        *((torch.bfloat16, 64, *tile) for tile in ((16, 1), (16, 3), (32, 1), (64, 2))),
        *((torch.float16, *tile) for tile in ((128, 16, 1), (128, 256, 1), (64, 32, 2))),
    ],
)
def test_products(dtype: torch.dtype, channels: int, tokens: int, splits: int) -> None:
    """Few and many tokens, channels and k of no whole tile, more tiles than multiprocessors, stages round the ring."""
    for m, n, k in ((1, 7, 321), (tokens + 3, 129, 400), (min(tokens, 64), 700, 322), (5, 128, 1300)):
        check_product(m, n, k, dtype, channels, tokens, splits)
