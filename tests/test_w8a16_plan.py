"""csrc/prefill/w8a16_plan.h, compiled for the host: tiles hold the tokens, no part of k is empty, small grids split."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_program import compile_program
from w8a16_checks import TILES, workspace_bytes

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "w8a16.jsonl"
Plan = Callable[[int, int, int], tuple[int, int, int, int]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_program("w8a16_plan.cpp", tmp_path_factory.mktemp("w8a16"))


@pytest.fixture(scope="module")
def plan(program: Path) -> Plan:
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


def test_the_model_expects_what_a_card_took(program: Path) -> None:
    """All tiles and splits that were timed on an H200: at 1.75 GHz within a third, and the choice within a tenth."""
    for line in map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines()):
        m, n, k, took = line["m"], line["n"], line["k"], line["tactics"]
        asked = {tactic: tactic.replace("x", " ").replace("/", " ") for tactic in took}
        given = "".join(f"{m} {n} {k} 132 {plan}\n" for plan in asked.values())
        run = subprocess.run([program, "clocks"], input=given, check=True, capture_output=True, text=True)
        for tactic, clocks in zip(asked, map(float, run.stdout.split()), strict=True):
            assert 0.65 < clocks / 1750 / took[tactic] < 1.25, (m, tactic)
        channels, tokens, splits, _ = ask(program, m, n, k)
        assert took[f"{channels}x{tokens}/{splits}"] < 1.1 * min(took.values()), m


def test_warpgroups_take_turns_where_many_small_tiles_follow_each_other(plan: Plan) -> None:
    assert plan(16, 128256, 256)[0] == 64
    assert plan(1024, 28672, 4096)[0] == 128
