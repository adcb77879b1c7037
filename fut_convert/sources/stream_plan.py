"""Which shards of a checkpoint are on the disk at which step of a conversion, when each is fetched once.

A step reads some tensors, in an order that calibration dictates. A shard is fetched before the first step that reads a
matrix of it, one shard further ahead than the next step needs, and goes after the last. Where tensors of it are needed
much later (the embedding, as the head; layers in alphabetical order), they alone are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a shard.

    Attributes:
        name: in the file.
        nbytes: its size.
        steps: those that read it, ascending.
        small: a vector, which may be read from the Hub by itself where its shard is not there.
    """

    name: str
    nbytes: int
    steps: tuple[int, ...]
    small: bool


@dataclass(frozen=True)
class Shard:
    """One file of weights, of `nbytes`, and its tensors."""

    name: str
    nbytes: int
    tensors: tuple[StoredTensor, ...]

    @property
    def first(self) -> int | None:
        """The first step that reads a matrix of it; None where none does."""
        return min((tensor.steps[0] for tensor in self.tensors if tensor.steps and not tensor.small), default=None)

    def rest(self, step: int) -> tuple[StoredTensor, ...]:
        """What is needed of it from a step on; nothing where it is vectors only."""
        left = tuple(tensor for tensor in self.tensors if tensor.steps and tensor.steps[-1] >= step)
        return left if any(not tensor.small for tensor in left) else ()

    def kept(self, held: int, step: int) -> int:
        """How many of its `held` bytes on the disk a step begins with: all, those of `rest` alone, or none."""
        rest = sum(tensor.nbytes for tensor in self.rest(step))
        idle = (self.first or 0) < step and not any(step in tensor.steps for tensor in self.tensors)
        # Copying is worth it where half becomes free: a shard is then copied once over at most.
        return rest if rest < held and (idle or 2 * rest <= held) else held


@dataclass(frozen=True)
class StreamPlan:
    """What a streamed conversion takes.

    Attributes:
        order: the shards in the order in which they are fetched, each once.
        fetched_bytes: their size.
        peak_bytes: most of it that is on the disk at once.
    """

    order: tuple[Shard, ...]
    fetched_bytes: int
    peak_bytes: int

    def to_dict(self) -> dict[str, int]:
        """JSON-ready form."""
        return {"shards": len(self.order), "fetched_bytes": self.fetched_bytes, "peak_bytes": self.peak_bytes}

    def fetched_by(self, step: int) -> tuple[Shard, ...]:
        """The shards whose fetching has begun when a step runs: those of this step and the next, and one more."""
        needed = sum((shard.first or 0) <= step + 1 for shard in self.order)
        return self.order[: needed + 1]


def plan_stream(shards: Sequence[Shard], last_step: int) -> StreamPlan:
    """Plan the fetching for steps 0 to `last_step`."""
    used = [shard for shard in shards if shard.first is not None]
    plan = StreamPlan(
        tuple(sorted(used, key=lambda shard: (shard.first or 0, shard.name))), sum(shard.nbytes for shard in used), 0
    )
    held: dict[str, int] = {}
    peak = fetched = 0
    for step in range(last_step + 1):
        keeps = {shard.name: shard.kept(held[shard.name], step) for shard in plan.order if shard.name in held}
        held = {name: size for name, size in held.items() if keeps[name]}
        for name, kept in keeps.items():
            if 0 < kept < held[name]:
                # The copy is whole before the original goes.
                peak = max(peak, sum(held.values()) + kept)
                held[name] = kept
        begun = plan.fetched_by(step)
        held |= {shard.name: shard.nbytes for shard in begun[fetched:]}
        fetched = len(begun)
        peak = max(peak, sum(held.values()))
    return StreamPlan(plan.order, plan.fetched_bytes, peak)
