"""Damaged files of every kind: nothing but our own errors comes out, in bounded time and memory.

`benchmarks/fuzz_readers.py` does the same for as long as one likes.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzzing.limits import TooSlowError, foreign_error
from fuzzing.mutations import damage_bytes, damage_json
from fuzzing.reader import OWN_ERRORS, Reader
from fuzzing.readers import READERS


@pytest.fixture(scope="module", params=READERS, ids=lambda reader: reader.name)
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    made: Reader = request.param(tmp_path_factory.mktemp("fuzzing"))
    yield made
    made.close()


def test_whole_files_are_read(reader: Reader) -> None:
    reader.read(reader.write(reader.whole))


@settings(max_examples=25, suppress_health_check=list(HealthCheck), database=None)
@given(random=st.randoms(use_true_random=False))
def test_only_own_errors_come_out(reader: Reader, random: Random) -> None:
    place = reader.write(reader.damaged(random))
    error = foreign_error(lambda: reader.read(place), OWN_ERRORS, reader.memory_bytes)
    if error is not None:
        raise error


def test_most_damage_is_noticed(reader: Reader) -> None:
    # What cannot tell damaged files from whole ones would pass the test above.
    def is_refused(seed: int) -> bool:
        try:
            reader.read(reader.write(reader.damaged(Random(seed))))
        except OWN_ERRORS:
            return True
        return False

    assert sum(map(is_refused, range(10))) >= 2


def test_a_hang_a_foreign_error_and_too_much_memory_are_told() -> None:
    def hang() -> None:
        while True:
            pass

    assert foreign_error(lambda: None, OWN_ERRORS) is None
    assert isinstance(foreign_error(lambda: {}["x"], OWN_ERRORS), KeyError)
    assert isinstance(foreign_error(lambda: bytearray(2 << 30), OWN_ERRORS), MemoryError)
    assert isinstance(foreign_error(hang, OWN_ERRORS, seconds=1), TooSlowError)

    def own() -> None:
        raise OWN_ERRORS("x \ud800")

    assert isinstance(foreign_error(own, OWN_ERRORS), UnicodeEncodeError)


def test_damage_is_the_same_for_the_same_seed_and_differs_otherwise() -> None:
    document = {"a": [1, {"b": "x"}], "c": None}
    texts = [damage_json(Random(seed), document) for seed in range(50)]
    assert texts == [damage_json(Random(seed), document) for seed in range(50)] and len(set(texts)) > 40
    assert len({damage_bytes(Random(seed), bytes(100)) for seed in range(50)}) > 40
