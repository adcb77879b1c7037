"""csrc/host/prefill_input.h, compiled for the host, against what chunks mean row by row."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fut_runtime.cuda.structs import PAGE_TOKENS
from host_program import compile_program

#: A request's slot, first position and tokens, and whether it gets logits and its call is over.
Request = tuple[int, int, int, bool, bool]
Fill = Callable[[int, list[Request]], list[list[int]]]

REQUESTS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 300), st.integers(1, 200), st.booleans(), st.booleans()),
    min_size=1,
    max_size=8,
    unique_by=lambda request: request[0],
)


@pytest.fixture(scope="module")
def fill(tmp_path_factory: pytest.TempPathFactory) -> Fill:
    program = compile_program("prefill_input.cpp", tmp_path_factory.mktemp("input"))

    def run(states: int, requests: list[Request]) -> list[list[int]]:
        text = f"{states} {len(requests)} " + " ".join(str(int(value)) for request in requests for value in request)
        done = subprocess.run([program], input=text, check=True, capture_output=True, text=True)
        return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]

    return run


@settings(max_examples=40, deadline=None)
@given(requests=REQUESTS, states=st.sampled_from([1, 21]))
def test_every_row_and_page_has_its_place(fill: Fill, requests: list[Request], states: int) -> None:
    rows = [(slot, position + i, number) for number, (slot, position, length, _, _) in enumerate(requests)
            for i in range(length)]  # fmt: skip
    firsts = [0]
    for _, _, length, _, _ in requests:
        firsts.append(firsts[-1] + length)
    found = fill(states, requests)
    assert found[0] == [1000 + i for i in range(len(rows))]
    assert (found[1], found[2], found[3]) == ([p for _, p, _ in rows], [s for s, _, _ in rows], [n for *_, n in rows])
    assert found[4] == firsts
    assert found[5] == [position for _, position, *_ in requests]
    assert found[6] == [slot for slot, *_ in requests]
    assert found[7] == [0 if states == 1 else slot for slot, *_ in requests]
    assert found[8] == [firsts[i + 1] - 1 for i, request in enumerate(requests) if request[3]]
    ended = [slot for slot, *_, over in requests if over]
    assert found[9] == ([0] * bool(ended) if states == 1 else ended)
    spans = [tuple(found[10][i : i + 4]) for i in range(0, len(found[10]), 4)]
    covered = [(slot, PAGE_TOKENS * page + first + i) for slot, page, first, count in spans for i in range(count)]
    assert covered == [(slot, position) for slot, position, _ in rows]
    assert all(0 <= first < first + count <= PAGE_TOKENS for _, _, first, count in spans)
    assert len(set(spans)) == len(spans) and found[11] == [1]


def test_a_long_prompt_and_many_short_ones(fill: Fill) -> None:
    found = fill(1, [(0, 131, 20000, True, True)])
    assert len(found[10]) // 4 == 313 and found[8] == [19999]
    # One token each, the last of its page or the first.
    found = fill(300, [(i, 63 + i % 2, 1, True, True) for i in range(256)])
    assert len(found[10]) // 4 == 256 and found[9] == list(range(256))
