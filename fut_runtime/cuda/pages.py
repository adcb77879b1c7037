"""Which pages of the cache belong to which request.

A page holds PAGE_TOKENS tokens of one request in every layer and KV head. A request gets all the pages that it can ever
need when it opens, so that no step can run out of them; it gives them back when it closes. Its slot is the row of the
page table that the kernels read.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from fut_runtime.cuda.structs import PAGE_TOKENS
from fut_runtime.errors import CacheFullError, FutError


@dataclass(frozen=True)
class Reservation:
    """What one request holds: its slot, its pages in the order of its tokens, and how many tokens it asked for."""

    slot: int
    pages: tuple[int, ...]
    capacity_tokens: int


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens of one request."""
    return -(-tokens // PAGE_TOKENS)


class PageAllocator:
    """Hands out slots and pages, the lowest free numbers first: what is in use stays at the beginning of the pool."""

    def __init__(self, pages: int, slots: int) -> None:
        """Begin with everything free.

        Raises:
            FutError: there is not at least one page and one slot.
        """
        if pages < 1 or slots < 1:
            raise FutError(f"a cache of {pages} pages for {slots} requests, expected at least one of each")
        self._pages = pages
        self._free_pages = list(range(pages))
        self._free_slots = list(range(slots))
        self._held: dict[int, Reservation] = {}

    @property
    def pages(self) -> int:
        """Pages of the pool, free or not."""
        return self._pages

    @property
    def free_pages(self) -> int:
        """Pages that no request holds."""
        return len(self._free_pages)

    @property
    def open_requests(self) -> int:
        """Requests that hold pages."""
        return len(self._held)

    def open(self, capacity_tokens: int) -> Reservation:
        """Reserve a slot and the pages for a request.

        Raises:
            CacheFullError: others hold the slots or the pages that it needs. Nothing has changed.
            FutError: the request is larger than the whole cache, or smaller than one token.
        """
        needed = pages_for(capacity_tokens)
        if capacity_tokens < 1:
            raise FutError(f"a request of {capacity_tokens} tokens, expected at least 1")
        if needed > self._pages:
            raise FutError(
                f"a request of {capacity_tokens} tokens does not fit the cache, which holds "
                f"{self._pages * PAGE_TOKENS} tokens in all"
            )
        if needed > len(self._free_pages):
            raise CacheFullError(
                f"a request of {capacity_tokens} tokens needs {needed} pages of the cache, and {self.open_requests} "
                f"open requests leave {self.free_pages} of {self._pages}: close one first, or plan for more tokens"
            )
        if not self._free_slots:
            raise CacheFullError(f"{self.open_requests} requests are open, as many as the cache has slots: close one")
        pages = tuple(heapq.heappop(self._free_pages) for _ in range(needed))
        reservation = Reservation(heapq.heappop(self._free_slots), pages, capacity_tokens)
        self._held[reservation.slot] = reservation
        return reservation

    def close(self, reservation: Reservation) -> None:
        """Give a request's slot and pages back.

        Raises:
            FutError: the reservation is not held, for it has been given back already.
        """
        if self._held.get(reservation.slot) is not reservation:
            raise FutError(f"slot {reservation.slot} of the cache is not held by this request")
        del self._held[reservation.slot]
        heapq.heappush(self._free_slots, reservation.slot)
        for page in reservation.pages:
            heapq.heappush(self._free_pages, page)
