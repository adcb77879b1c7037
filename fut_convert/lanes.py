"""Sums over all calibration windows that come out the same however many processes share the windows.

Floating-point sums depend on their order. So the windows are divided into a fixed number of lanes; each lane is summed
up from its first window to its last, by whichever process it belongs to, and the lanes' sums are added in their order,
by the first process. With one process nothing is different but that all lanes are its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

#: More processes than lanes cannot share the windows.
LANES = 8


class Lanes:
    """The windows of one process among several, and what it exchanges with the others.

    The default process group of torch.distributed connects them. Tensors that are exchanged lie on its device.

    Attributes:
        rank: this process; the first has 0, and gets the sums.
        own: the windows of each lane of this process, as slices of its own windows.
    """

    def __init__(self, windows: int, rank: int = 0, processes: int = 1) -> None:
        """Divide a number of windows."""
        self.rank = rank
        self._processes = processes
        size = -(-windows // LANES)
        starts = range(0, windows, size)
        self._all = [slice(start, min(start + size, windows)) for start in starts]
        self.own: list[slice] = []
        for lane in self._all[rank::processes]:
            first = self.own[-1].stop if self.own else 0
            self.own.append(slice(first, first + lane.stop - lane.start))

    @staticmethod
    def processes(windows: int, wanted: int) -> int:
        """How many processes of those wanted have a lane each."""
        return min(wanted, len(Lanes(windows)._all))

    @property
    def first(self) -> bool:
        """Whether this is the process that gets the sums."""
        return self.rank == 0

    @property
    def count(self) -> int:
        """Windows of this process."""
        return self.own[-1].stop if self.own else 0

    def windows(self, ids: Tensor) -> Tensor:
        """This process's rows of a tensor that has a row for each window."""
        return torch.cat([ids[lane] for lane in self._all[self.rank :: self._processes]] or [ids[:0]])

    def among_all(self, window: int) -> int:
        """Which of all windows a window of this process is."""
        lane, place = next((lane, p) for lane, owner, p in self.places() if owner == self.rank and window < p.stop)
        return int(lane.start + window - place.start)

    def places(self) -> Iterator[tuple[slice, int, slice]]:
        """Every lane in order: its windows among all, the process it belongs to, and among that one's windows."""
        ends = [0] * self._processes
        for number, lane in enumerate(self._all):
            owner = number % self._processes
            size = lane.stop - lane.start
            yield lane, owner, slice(ends[owner], ends[owner] + size)
            ends[owner] += size

    def total(self, sums: Iterable[Sequence[Tensor]]) -> list[Tensor]:
        """Sum over all windows, in the first process; nothing in the others.

        Args:
            sums: of each lane of this process in order: some tensors, of the same shapes and dtypes in all processes.
                They may be overwritten once the next is asked for.
        """
        if not self.first:
            for part in sums:
                for tensor in part:
                    self.send(tensor)
            return []
        own = iter(sums)
        totals: list[Tensor] = []
        for _, owner, _ in self.places():
            part = next(own) if owner == 0 else [self.receive(torch.empty_like(t), owner) for t in totals]
            totals = [total.add_(t) for total, t in zip(totals, part, strict=True)] if totals else list(part)
            del part
        if next(own, None) is not None:
            raise ValueError("there are more sums than lanes")
        return totals

    def largest(self, values: Tensor) -> Tensor:
        """Elementwise maximum over the processes of a tensor that each of them has, in the first of them."""
        if not self.first:
            self.send(values)
            return values
        for owner in range(1, min(self._processes, len(self._all))):
            values = torch.maximum(values, self.receive(torch.empty_like(values), owner))
        return values

    def send(self, tensor: Tensor) -> None:
        """Send a tensor to the first process."""
        dist.send(_octets(tensor.contiguous()), 0)

    def receive(self, tensor: Tensor, owner: int) -> Tensor:
        """Receive a tensor from another process, in place of what this contiguous one holds."""
        dist.recv(_octets(tensor), owner)
        return tensor

    def share(self, tensor: Tensor) -> Tensor:
        """Give all processes the first one's tensor: elsewhere in place of what this one holds."""
        if self._processes > 1:
            dist.broadcast(_octets(tensor), 0)
        return tensor


def _octets(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: not all backends know all types."""
    return tensor.view(-1).view(torch.uint8)
