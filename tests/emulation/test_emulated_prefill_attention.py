"""Prompts' attention as the kernel computes it, a fiber a thread, pages of K and V landing in random order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import attention_checks
from emulation.conftest import OnTheHost
from fut_runtime.cuda import prefill_attention


@pytest.fixture(autouse=True)
def emulation(on_the_host: OnTheHost) -> Iterator[None]:
    """`fut_runtime.cuda.prefill_attention` runs in the emulation."""
    with on_the_host(prefill_attention, "fut_prefill_attention"):
        yield


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 64), (3, 1, 80), (8, 1, 96), (1, 1, 128)])
def test_awkward_lengths_side_by_side(heads: int, kv_heads: int, head_dim: int) -> None:
    lengths = (1, 7, 63, 64, 65, 127, 129, 300) if heads < 8 else (1, 7, 63, 65, 130)
    attention_checks.check_attention([(0, length) for length in lengths], heads, kv_heads, head_dim)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 1, 64), (2, 2, 80), (3, 3, 96), (8, 1, 128)])
def test_chunks_that_continue_at_any_position(heads: int, kv_heads: int, head_dim: int) -> None:
    chunks = [(1, 1), (63, 2), (64, 64), (128, 1), (127, 40), (300, 17), (5, 0), (191, 65)]
    attention_checks.check_attention(chunks, heads, kv_heads, head_dim)


def test_more_requests_than_a_warp_has_lanes() -> None:
    attention_checks.check_attention([(3 * i % 7, i % 5) for i in range(70)], 2, 1, 64)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 1, 64), (1, 1, 128)])
def test_a_row_does_not_depend_on_its_company_or_its_chunk(heads: int, kv_heads: int, head_dim: int) -> None:
    attention_checks.check_company(heads, kv_heads, head_dim, 270, [1, 100, 128, 200])


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_output_in_e4m3(head_dim: int) -> None:
    attention_checks.check_quantized([(0, 70), (30, 9), (0, 1)], 3, 1, head_dim)


def test_what_a_row_must_not_see_may_be_infinite() -> None:
    attention_checks.check_infinite_values()
