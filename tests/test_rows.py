"""Row orders: what lies where, padding, round trips, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fut_runtime.artifact.rows import ROW_ORDERS, to_natural_rows, to_stored_rows
from fut_runtime.errors import ArtifactError


def test_natural_pads_at_the_end() -> None:
    x = torch.arange(1, 4)[:, None]
    assert to_stored_rows(x, "natural", 5).flatten().tolist() == [1, 2, 3, 0, 0]


def test_interleave1_alternates_gate_and_up() -> None:
    gate, up = torch.arange(1, 4), torch.arange(11, 14)
    assert to_stored_rows(torch.cat((gate, up)), "interleave1", 8).tolist() == [1, 11, 2, 12, 3, 13, 0, 0]


def test_interleave8_puts_up_eight_rows_below_its_gate() -> None:
    gate, up = torch.arange(100, 111), torch.arange(200, 211)
    stored = to_stored_rows(torch.cat((gate, up)), "interleave8", 32).tolist()
    for channel in range(16):
        tile, row = divmod(channel, 8)
        assert stored[16 * tile + row] == (100 + channel if channel < 11 else 0)
        assert stored[16 * tile + row + 8] == (200 + channel if channel < 11 else 0)


@given(
    order=st.sampled_from(ROW_ORDERS),
    half=st.integers(1, 40),
    padding=st.integers(0, 3),
    tail=st.sampled_from([(), (3,), (2, 2)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
)
def test_round_trip(order: str, half: int, padding: int, tail: tuple[int, ...], dtype: torch.dtype) -> None:
    rows = 2 * half
    padded = -(-rows // 16) * 16 + 16 * padding
    x = torch.randint(1, 100, (rows, *tail)).to(dtype)
    stored = to_stored_rows(x, order, padded)
    assert stored.shape == (padded, *tail) and stored.dtype == dtype
    assert torch.equal(to_natural_rows(stored, order, rows), x)
    kept = torch.count_nonzero(stored.float())
    assert kept == x.numel(), "padding must be zero and no row may be lost"


def test_fp8_rows() -> None:
    x = torch.randn(6, 16).to(torch.float8_e4m3fn)
    stored = to_stored_rows(x, "interleave1", 16)
    assert torch.equal(to_natural_rows(stored, "interleave1", 6).view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize(
    ("order", "rows", "padded"),
    [("zigzag", 4, 4), ("natural", 8, 4), ("interleave1", 3, 4), ("interleave8", 16, 24), ("interleave8", 2, 8)],
)
def test_refusals(order: str, rows: int, padded: int) -> None:
    with pytest.raises(ArtifactError, match=order):
        to_stored_rows(torch.zeros(rows), order, padded)
