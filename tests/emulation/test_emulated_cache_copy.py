"""The decode cache's copy of a history as the kernel makes it, a fiber a thread."""

from __future__ import annotations

import pytest

from attention_setup import Shape
from cache_copy_checks import CASES, check_copy
from fut_runtime.cuda.library import Library


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize(
    "shape",
    [
        Shape(2, 2, 128),
        Shape(4, 1, 80),
        Shape(2, 1, 96, zero_point=False),
        Shape(2, 2, 64, rotation=False),
        Shape(2, 1, 80, bits=16),
        Shape(4, 2, 64, bits=16),
    ],
    ids=str,
)
def test_the_copy_has_the_bytes_of_an_append(emulated: Library, shape: Shape, case: str) -> None:
    check_copy(shape, case, emulated, "cpu")
