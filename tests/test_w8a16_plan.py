"""csrc/prefill/w8a16_plan.h, compiled for the host: tiles hold the tokens, no part of k is empty, small grids split."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_program import compile_program
from w8a16_checks import TILES, workspace_bytes

Plan = Callable[[int, int, int], tuple[int, int, int, int]]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    program = compile_program("w8a16_plan.cpp", tmp_path_factory.mktemp("w8a16"))
    return lambda m, n, k: ask(program, m, n, k)


def ask(program: Path, m: int, n: int, k: int) -> tuple[int, int, int, int]:
    run = subprocess.run([program], input=f"{m} {n} {k} 132", check=True, capture_output=True, text=True)
    channels, tokens, splits, nbytes = map(int, run.stdout.split())
    return channels, tokens, splits, nbytes


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 32768), st.integers(1, 60000), st.integers(1, 60000))
def test_plans_of_any_size_can_be_run(plan: Plan, m: int, n: int, k: int) -> None:
    channels, tokens, splits, nbytes = plan(m, n, k)
    assert (channels, tokens) in TILES and 1 <= splits <= 16
    assert tokens == 256 or m <= tokens < max(2 * m, 32)
    stages = -(-k // 64)
    assert splits == 1 or -(-stages // splits) * (splits - 1) < stages
    assert nbytes == workspace_bytes(m, n, channels, tokens, splits)


def test_grids_that_do_not_fill_the_card_are_split(plan: Plan) -> None:
    for m, n, k in ((1, 4096, 14336), (16, 1024, 8192), (64, 2048, 8192)):
        channels, _, splits, _ = plan(m, n, k)
        assert splits * -(-n // channels) >= 66, (m, n, k, splits)


def test_grids_that_fill_it_many_times_are_not(plan: Plan) -> None:
    assert plan(2048, 28672, 4096)[2] == 1


def test_warpgroups_take_turns_where_many_small_tiles_follow_each_other(plan: Plan) -> None:
    assert plan(16, 128256, 256)[0] == 64
    assert plan(1024, 28672, 4096)[0] == 128
