"""The plan of a streamed conversion: every tensor is there when it is read, each shard comes once, little is kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fut_convert.sources.stream_plan import Shard, StoredTensor, StreamPlan, plan_stream

LAST_STEP = 9


def tensor(name: str, nbytes: int, *steps: int, small: bool = False) -> StoredTensor:
    return StoredTensor(name, nbytes, steps, small)


def shard(name: str, *tensors: StoredTensor) -> Shard:
    return Shard(name, sum(t.nbytes for t in tensors), tensors)


@st.composite
def shards(draw: st.DrawFn) -> list[Shard]:
    steps = st.lists(st.integers(0, LAST_STEP), max_size=3, unique=True).map(sorted).map(tuple)
    counts = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    return [
        Shard(
            f"shard {number}",
            1000,
            tuple(
                StoredTensor(f"{number}.{i}", draw(st.integers(1, 1000 // count)), draw(steps), draw(st.booleans()))
                for i in range(count)
            ),
        )
        for number, count in enumerate(counts)
    ]


def follow(plan: StreamPlan) -> tuple[dict[str, int], int]:
    """Do what the plan says: how often each shard was fetched, and the most bytes that were on the disk."""
    fetched: dict[str, int] = {}
    disk: dict[str, tuple[int, set[str]]] = {}
    peak = 0
    for step in range(LAST_STEP + 1):
        gone = [s for s in plan.order if s.name in disk and s.kept(disk[s.name][0], step) == 0]
        for one in gone:
            del disk[one.name]
        for one in plan.order:
            if one.name in disk and (kept := one.kept(disk[one.name][0], step)) < disk[one.name][0]:
                peak = max(peak, sum(size for size, _ in disk.values()) + kept)
                disk[one.name] = (kept, {t.name for t in one.rest(step)})
        for one in plan.fetched_by(step):
            if one.name not in fetched:
                fetched[one.name] = 1
                disk[one.name] = (one.nbytes, {t.name for t in one.tensors})
        peak = max(peak, sum(size for size, _ in disk.values()))
        for one in plan.order:
            for needed in one.tensors:
                if step in needed.steps and not needed.small:
                    assert needed.name in disk[one.name][1]
    return fetched, peak


@given(shards())
def test_every_matrix_is_there_when_it_is_read_and_every_shard_comes_once(found: list[Shard]) -> None:
    plan = plan_stream(found, LAST_STEP)
    needed = {s.name for s in found if any(t.steps and not t.small for t in s.tensors)}
    fetched, peak = follow(plan)
    assert fetched == dict.fromkeys(needed, 1)
    assert plan.fetched_bytes == sum(s.nbytes for s in found if s.name in needed)
    assert plan.peak_bytes == peak


def test_layers_in_order_take_the_disk_of_three_shards() -> None:
    layers = [tensor(f"layer {i}", 100, i + 1) for i in range(8)]
    ends = [tensor("embedding", 80, 0), tensor("norm", 1, 0, LAST_STEP, small=True), tensor("head", 80, LAST_STEP)]
    found = [
        shard("a", ends[0], layers[0]), shard("b", *layers[1:3]), shard("c", *layers[3:5]), shard("d", *layers[5:7]),
        shard("e", layers[7], *ends[1:]),
    ]  # fmt: skip
    plan = plan_stream(found, LAST_STEP)
    assert [s.name for s in plan.order] == list("abcde")
    # The norm in the last shard is no reason to fetch that one first.
    assert [s.name for s in plan.fetched_by(0)] == ["a", "b"]
    assert plan.peak_bytes <= 3 * 200 + 1 < plan.fetched_bytes


def test_of_an_embedding_that_is_the_head_as_well_only_itself_is_kept() -> None:
    first = shard("a", tensor("embedding", 50, 0, LAST_STEP), tensor("layer 0", 400, 1))
    found = [first, *(shard(f"b{i}", tensor(f"layer {i}", 400, i + 1)) for i in range(1, 8))]
    plan = plan_stream(found, LAST_STEP)
    assert [first.kept(450, step) for step in (1, 2, LAST_STEP)] == [450, 50, 50]
    assert first.kept(50, LAST_STEP + 1) == 0
    # While the first layer runs the shard of the next has come and one more comes; then the embedding is copied.
    assert plan.peak_bytes == 450 + 2 * 400 + 50


def test_layers_in_alphabetical_order_are_kept_until_their_turn() -> None:
    names = sorted(range(1, 9), key=str)
    found = [shard(f"s{n}", *(tensor(f"layer {i}", 100, i) for i in names[n : n + 2])) for n in range(0, 8, 2)]
    assert follow(plan_stream(found, LAST_STEP))[0] == {s.name: 1 for s in found}
