"""csrc/prefill/attention_plan.h, compiled for the host, against tiles cut one row at a time."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from host_program import compile_program

ROWS = KEYS = 128
Ask = Callable[[int, int, int], list[list[str]]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    program = compile_program("attention_plan.cpp", tmp_path_factory.mktemp("attention"))

    def run(position: int, tokens: int, group: int) -> list[list[str]]:
        text = f"{position} {tokens} {group}"
        done = subprocess.run([program], input=text, check=True, capture_output=True, text=True)
        return [line.split() for line in done.stdout.splitlines()]

    return run


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 1500), st.integers(1, 17))
@example(0, 128, 1)
@example(127, 1, 3)
@example(128, 0, 4)
@example(64, 65, 128)
def test_tiles_and_their_levels(ask: Ask, position: int, tokens: int, group: int) -> None:
    rows = [position + row // group + 1 for row in range(tokens * group)]
    tiles = [max(rows[begin : begin + ROWS]) for begin in range(0, len(rows), ROWS)]
    keys, by_level, above = ask(position, tokens, group)
    assert [int(key) for key in keys] == tiles
    levels = [-(-key // KEYS) for key in tiles]
    assert levels == sorted(levels) and all(b - a <= 1 for a, b in itertools.pairwise(levels))
    for level, answer in enumerate(by_level):
        lower = [other for other in levels if other < level]
        assert answer == f"{sum(other <= level for other in levels)},{max(lower, default=0)}", level
    assert above == [f"{len(tiles)},{max(levels, default=0)}"]
