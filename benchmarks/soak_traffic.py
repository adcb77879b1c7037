"""Requests that join and leave a backend at random, a call at a time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fut_runtime.backend import Backend, Draw, DrawsTokens
from fut_runtime.errors import CacheFullError, FutError
from fut_runtime.sampling import Sampler, SamplingParams


@dataclass
class Visitor:
    """One request: what is left of its prompt, its sampler, and the tokens that it still wants."""

    handle: int
    prompt: list[int]
    sampler: Sampler
    wanted: int
    last: int = -1


@dataclass
class Traffic:
    """Random requests on a backend.

    Attributes:
        most_open: requests that hold a cache at once.
        longest: most tokens of a request.
        counts: what happened, by name.
    """

    backend: Backend
    chance: random.Random
    most_open: int
    longest: int
    counts: Counter[str] = field(default_factory=Counter)
    reading: list[Visitor] = field(default_factory=list)
    decoding: list[Visitor] = field(default_factory=list)

    def step(self) -> None:
        """Let some join and leave, then make one call: chunks of prompts, a token each, or one that is refused."""
        self._join()
        self._leave()
        kind = self.chance.random()
        if kind < 0.01:
            self._refused()
        elif self.reading and (kind < 0.3 or not self.decoding):
            self._read()
        elif self.decoding:
            self._decode()

    def close(self) -> None:
        """Let everyone leave."""
        for visitor in (*self.reading, *self.decoding):
            self.backend.close_request(visitor.handle)
        self.reading.clear()
        self.decoding.clear()

    def _join(self) -> None:
        while len(self.reading) + len(self.decoding) < self.most_open and self.chance.random() < 0.3:
            # Short prompts and long ones: their logarithm is uniform.
            total = max(2, int(self.longest ** self.chance.uniform(0.2, 1.0)))
            length = self.chance.randint(1, total - 1)
            try:
                handle = self.backend.open_request(total)
            except CacheFullError:
                self.counts["no room"] += 1
                return
            prompt = [self.chance.randrange(self.backend.spec.vocab_size) for _ in range(length)]
            self.reading.append(Visitor(handle, prompt, Sampler(self._parameters(), prompt), total - length))
            self.counts["joined"] += 1

    def _parameters(self) -> SamplingParams:
        chance = self.chance
        if chance.random() < 0.3:
            return SamplingParams()
        return SamplingParams(
            temperature=chance.uniform(0.2, 2.0),
            top_k=chance.choice([0, 1, 40, 1000]),
            top_p=chance.choice([1.0, chance.uniform(0.05, 1.0)]),
            min_p=chance.choice([0.0, chance.uniform(0.0, 0.3)]),
            seed=chance.randrange(2**31),
        )

    def _leave(self) -> None:
        """Some go before they are done, in the middle of their prompt too."""
        for group in (self.reading, self.decoding):
            if group and self.chance.random() < 0.02:
                visitor = group.pop(self.chance.randrange(len(group)))
                self.backend.close_request(visitor.handle)
                self.counts["cancelled"] += 1

    def _read(self) -> None:
        some = self.chance.sample(self.reading, self.chance.randint(1, min(4, len(self.reading))))
        chunks = []
        for visitor in some:
            size = self.chance.choice([1, 7, 64, 100, len(visitor.prompt)])
            chunks.append((visitor.handle, visitor.prompt[:size]))
        logits = self.backend.prefill(chunks)
        self.counts["prompt calls"] += 1
        self.counts["tokens"] += sum(len(ids) for _, ids in chunks)
        for visitor, (_, ids), row in zip(some, chunks, logits, strict=True):
            del visitor.prompt[: len(ids)]
            if not visitor.prompt:
                self.reading.remove(visitor)
                visitor.last, _ = visitor.sampler.choose(row)
                self.decoding.append(visitor)

    def _decode(self) -> None:
        some = [visitor for visitor in self.decoding if self.chance.random() < 0.9] or self.decoding[:1]
        self.chance.shuffle(some)
        chosen, logits = self._call([(v.handle, v.last) for v in some], [v.sampler.draw() for v in some])
        self.counts["decode calls"] += 1
        self.counts["tokens"] += len(some)
        for visitor, token, row in zip(some, chosen, logits, strict=True):
            if token is None:
                visitor.last, _ = visitor.sampler.choose(row)
            else:
                visitor.last = token
                visitor.sampler.drawn()
            visitor.wanted -= 1
            if visitor.wanted == 0:
                self.backend.close_request(visitor.handle)
                self.decoding.remove(visitor)
                self.counts["finished"] += 1

    def _call(
        self, tokens: Sequence[tuple[int, int]], draws: Sequence[Draw | None]
    ) -> tuple[Sequence[int | None], Tensor]:
        if isinstance(self.backend, DrawsTokens):
            return self.backend.decode_and_draw(tokens, draws)
        return [None] * len(tokens), self.backend.decode(tokens)

    def _refused(self) -> None:
        """A call that must be refused and change nothing: an unknown token, a closed request, too many tokens."""
        vocab, limit = self.backend.spec.vocab_size, self.backend.max_context_tokens
        try:
            handle = self.backend.open_request(2)
        except CacheFullError:
            self.counts["no room"] += 1
            return
        wrong = [[(handle, [vocab])], [(handle + 10**6, [0])], [(handle, [0, 0, 0])]]
        for chunks in wrong:
            try:
                self.backend.prefill(chunks)
            except FutError:
                self.counts["refused"] += 1
            else:
                raise FutError(f"the backend took {chunks}")
        self.backend.close_request(handle)
        try:
            self.backend.open_request(limit + 1)
        except FutError:
            self.counts["refused"] += 1
        else:
            raise FutError(f"the backend opened a request of {limit + 1} tokens")
