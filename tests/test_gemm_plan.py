"""csrc/prefill/gemm_plan.h, compiled for the host: tiles cover a product once, and the cost model chooses well."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_program import compile_program
from repository import REPOSITORY

MEASURED = REPOSITORY / "benchmarks" / "results" / "prefill-gemm-tiles.jsonl"
#: What a choice may lose against the best tile of the same run, whose own figures differ by 1 % from run to run.
REGRET = 1.035
Ask = Callable[..., list[str]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    program = compile_program("gemm_plan.cpp", tmp_path_factory.mktemp("gemm"))

    def run(*words: object) -> list[str]:
        text = " ".join(map(str, words))
        return subprocess.run([program], input=text, check=True, capture_output=True, text=True).stdout.split()

    return run


def plan(
    ask: Ask,
    m: int,
    n: int,
    k_bytes: int,
    *,
    head_dim: int = 0,
    sms: int = 132,
    promoted: bool = False,
    widest: int = 256,
) -> tuple[int, int, int, float]:
    tile_n, cluster, group, clocks = ask("plan", m, n, k_bytes, head_dim, sms, int(promoted), widest)
    return int(tile_n), int(cluster), int(group), float(clocks)


def measured() -> list[dict[str, object]]:
    return [json.loads(line) for line in Path(MEASURED).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    "line", measured(), ids=lambda r: f"{r['format']}-{r['accumulation']}-{r['m']}-{r['n']}-{r['k']}"
)
def test_choices_are_the_best_of_those_measured(ask: Ask, line: dict[str, object]) -> None:
    m, n, k = (int(line[name]) for name in "mnk")  # type: ignore[call-overload]
    k_bytes = k * (2 if line["format"] == "bf16" else 1)
    tile_n, cluster, *_ = plan(ask, m, n, k_bytes, promoted=line["accumulation"] == "promoted")
    us = {tile: t for tile, t in line["us"].items() if tile != "torch"}  # type: ignore[attr-defined]
    chosen = us.get(f"{tile_n}x{cluster}", us.get(f"{tile_n}x1"))
    assert chosen <= REGRET * min(us.values()), (tile_n, cluster, us)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 20))
def test_every_tile_is_computed_once(ask: Ask, rows: int, columns: int, group: int) -> None:
    places = [tuple(map(int, place.split(","))) for place in ask("order", rows, columns, group)]
    assert sorted(places) == [(row, column) for row in range(rows) for column in range(columns)]
    # A column of a group is walked down before the next begins.
    height = min(group, rows)
    assert places[:height] == [(row, 0) for row in range(height)]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40000), st.integers(1, 200000), st.integers(1, 60000), st.sampled_from([0, 64, 80, 96, 128]))
def test_plans_of_any_size_are_ones_that_kernels_exist_for(
    ask: Ask, m: int, n: int, k_bytes: int, head_dim: int
) -> None:
    for promoted in (False, True):
        tile_n, cluster, group, clocks = plan(ask, m, n, k_bytes, head_dim=head_dim, promoted=promoted)
        assert tile_n in (128, 256) and cluster in (1, 2) and group * cluster * 128 == 2048
        assert clocks > 0
        assert m > 128 or cluster == 1
    assert plan(ask, m, n, k_bytes, promoted=True, widest=128)[0] == 128


def test_heads_that_fill_no_narrow_tile_get_wide_ones(ask: Ask) -> None:
    """Of 128 columns one head of 80 uses 80, of 256 three use 240."""
    assert plan(ask, 4096, 80 * 48, 4096, head_dim=80)[0] == 256
    assert plan(ask, 4096, 128 * 48, 4096, head_dim=128)[0] == 128
