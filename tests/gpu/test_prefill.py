"""Prefill on the card: the decode cache's copy of the history against what decoding appends."""

from __future__ import annotations

import pytest

from attention_setup import Shape
from cache_copy_checks import CASES, check_copy
from fut_runtime.cuda.library import library

pytestmark = pytest.mark.usefixtures("built")


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_the_copy_has_the_bytes_of_an_append(head_dim: int, bits: int, case: str) -> None:
    check_copy(Shape(8, 2, head_dim, bits=bits), case, library(), "cuda")
