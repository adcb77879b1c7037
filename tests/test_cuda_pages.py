"""Pages and slots of the cache: nobody gets what another holds, nothing is lost, and refusals change nothing."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fut_runtime.cuda.pages import PageAllocator, Reservation, pages_for
from fut_runtime.errors import CacheFullError, FutError

PAGES, SLOTS = 20, 6


class Requests(RuleBasedStateMachine):
    """Requests come and go at random; what is held and what is free is compared with plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(PAGES, SLOTS)
        self.held: list[Reservation] = []

    @rule(tokens=st.integers(1, 64 * (PAGES + 2)))
    def open(self, tokens: int) -> None:
        needed = -(-tokens // 64)
        free = set(range(PAGES)) - {p for r in self.held for p in r.pages}
        slots = set(range(SLOTS)) - {r.slot for r in self.held}
        try:
            reservation = self.allocator.open(tokens)
        except CacheFullError:
            assert needed <= PAGES and (needed > len(free) or not slots)
        except FutError:
            assert needed > PAGES
        else:
            assert list(reservation.pages) == sorted(free)[:needed] and reservation.slot == min(slots)
            assert reservation.capacity_tokens == tokens
            self.held.append(reservation)

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        if self.held:
            self.allocator.close(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(data=st.data())
    def close_twice(self, data: st.DataObject) -> None:
        if self.held:
            reservation = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.allocator.close(reservation)
            with pytest.raises(FutError, match="is not held"):
                self.allocator.close(reservation)

    @invariant()
    def counts_are_true(self) -> None:
        assert self.allocator.free_pages == PAGES - sum(len(r.pages) for r in self.held)
        assert self.allocator.open_requests == len(self.held)


TestRequests = Requests.TestCase


def test_a_page_holds_64_tokens() -> None:
    assert [pages_for(n) for n in (1, 64, 65, 128, 131072)] == [1, 1, 2, 2, 2048]


def test_refusals_say_what_is_missing() -> None:
    allocator = PageAllocator(pages=3, slots=2)
    allocator.open(100)
    with pytest.raises(CacheFullError, match=r"needs 2 pages of the cache, and 1 open requests leave 1 of 3"):
        allocator.open(65)
    allocator.open(1)
    with pytest.raises(CacheFullError, match="needs 1 pages"):
        allocator.open(1)
    with pytest.raises(FutError, match=r"does not fit the cache, which holds 192 tokens"):
        allocator.open(193)
    with pytest.raises(FutError, match="expected at least 1"):
        allocator.open(0)
    with pytest.raises(FutError, match="at least one of each"):
        PageAllocator(0, 1)


def test_slots_may_run_out_before_pages() -> None:
    allocator = PageAllocator(pages=3, slots=1)
    first = allocator.open(1)
    with pytest.raises(CacheFullError, match="as many as the cache has slots"):
        allocator.open(1)
    allocator.close(first)
    assert allocator.open(1) is not first
