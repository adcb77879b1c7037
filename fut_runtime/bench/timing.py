"""Times of work on the card, and how fast it reads its memory."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping

import torch

from fut_runtime.cuda.device_memory import allocate
from fut_runtime.cuda.library import library

#: Far beyond the L2, so that it is memory that is read.
_READ_BYTES = 4 << 30


def interval_ms(work: Callable[[], object], *, repeats: int, warm_up: int) -> float:
    """Median milliseconds from the end of one call's work to the end of the next one's, calls queued without a pause.

    The card never waits for the host unless the host needs longer to queue a call than the card to run it.
    """
    for _ in range(warm_up):
        work()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 2)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    # The first interval begins with an idle card.
    return statistics.median([float(a.elapsed_time(b)) for a, b in itertools.pairwise(events[1:])])


def replay_us(work: Callable[[], object], *, repeats: int) -> float:
    """Median microseconds of work captured into a graph, each replay waited for."""
    return interleaved_us({"work": work}, repeats=repeats)["work"]


def interleaved_us(works: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """The same for several works that take turns, so that all see the same clocks and the same heat."""
    graphs = {}
    for name, work in works.items():
        work()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            work()
        graphs[name].replay()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(float(begin.elapsed_time(end)) * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second that one kernel reads from the card's memory: the median of 15 passes over 4 GiB."""
    data = allocate(_READ_BYTES, device, "the measure of the read bandwidth")
    data.view(torch.int64).random_()
    checksum = torch.zeros(1, dtype=torch.int32, device=device)

    def read() -> None:
        stream = torch.cuda.current_stream(device).cuda_stream
        library().call("fut_read_bandwidth", data.data_ptr(), _READ_BYTES, checksum.data_ptr(), stream)

    return _READ_BYTES / interval_ms(read, repeats=15, warm_up=3) * 1e3
