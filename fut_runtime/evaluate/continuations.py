"""Log-likelihoods of several continuations of one context: what multiple choice is scored by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fut_runtime.backend import Backend
from fut_runtime.errors import FutError
from fut_runtime.evaluate.runner import ReferenceRunner
from fut_runtime.reference.cache import RequestCache

#: A cache that questions share is made for multiples of so many tokens.
_CAPACITY_STEP = 256


@dataclass(frozen=True)
class Score:
    """Of one continuation: its natural log-likelihood, and whether greedy decoding would have produced it."""

    log_likelihood: float
    greedy: bool


class Scorer(Protocol):
    """Scores continuations of a context."""

    @property
    def max_tokens(self) -> int:
        """Most tokens that a context and a continuation may have together."""
        ...

    def score(self, context: Sequence[int], continuations: Sequence[Sequence[int]]) -> list[Score]:
        """Score each continuation after the context; neither may be empty.

        Raises:
            FutError: one is empty, too long or outside the vocabulary, or a likelihood is not a number.
        """
        ...


class ReferenceScorer:
    """Scores on the reference model: the context runs once, then all continuations side by side over its cache.

    The runner's protocol says how. `decode`: everything through the decode path. `prefill`: the context is one prefill
    call and the continuations the call after it, with the E4M3 scales that a request's second call has. `serve`: the
    context is prefilled, the continuations decoded. What a context has in common with the one before it is kept, where
    a token's numbers cannot depend on the call that it came in.
    """

    def __init__(self, runner: ReferenceRunner) -> None:
        self._runner = runner
        self._model = runner.model
        scales = runner.scales() if runner.protocol == "prefill" else None
        self._keeps_prefix = runner.protocol == "decode" or (
            runner.protocol == "prefill" and (scales is None or scales.frozen)
        )
        self._cache: RequestCache | None = None
        self._held: list[int] = []

    @property
    def max_tokens(self) -> int:
        """Positions of the model."""
        return self._model.spec.max_position_embeddings

    @torch.inference_mode()
    def score(self, context: Sequence[int], continuations: Sequence[Sequence[int]]) -> list[Score]:
        """See `Scorer`."""
        _check(context, continuations, self.max_tokens)
        scales = None if self._runner.protocol == "decode" else self._runner.scales()
        first_path = "decode" if self._runner.protocol == "decode" else "prefill"
        then_path = "prefill" if self._runner.protocol == "prefill" else "decode"
        cache, new = self._opened(context, max(map(len, continuations)))
        with self._runner.counted(scales):
            hidden = [self._model.forward(cache, new, first_path, scales)[-1:]]
        # The last token of a continuation predicts nothing that is scored.
        branches = [list(c[:-1]) for c in continuations if len(c) > 1]
        if branches:
            with self._runner.counted(scales if then_path == "prefill" else None):
                hidden.append(self._model.forward_branches(cache, branches, then_path, scales))
        likelihoods = self._model.logits(torch.cat(hidden).contiguous()).float().log_softmax(-1)
        scores, row = [], 1
        for continuation in continuations:
            own = torch.cat([likelihoods[:1], likelihoods[row : row + len(continuation) - 1]])
            row += len(continuation) - 1
            scores.append(_score(own, continuation))
        return scores

    def _opened(self, context: Sequence[int], longest: int) -> tuple[RequestCache, list[int]]:
        """A cache, and the tokens of the context that it does not hold yet: one at least."""
        needed = len(context) + longest - 1
        if not self._keeps_prefix:
            return self._model.new_cache(needed), list(context)
        shared = 0
        if self._cache is not None and needed <= self._cache.capacity:
            pairs = zip(self._held, context[:-1], strict=False)
            shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self._held), len(context) - 1))
        else:
            room = -(-needed // _CAPACITY_STEP) * _CAPACITY_STEP
            self._cache = self._model.new_cache(min(room, max(needed, self.max_tokens)))
        self._cache.rewind(shared)
        self._held = list(context)
        return self._cache, list(context[shared:])


class BackendScorer:
    """Scores on any backend, token by token: the context is prefilled, continuations are decoded as one batch."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def max_tokens(self) -> int:
        """Tokens that a request of the backend may hold."""
        return self._backend.max_context_tokens

    @torch.inference_mode()
    def score(self, context: Sequence[int], continuations: Sequence[Sequence[int]]) -> list[Score]:
        """See `Scorer`."""
        _check(context, continuations, self.max_tokens)
        requests: list[int] = []
        try:
            for continuation in continuations:
                requests.append(self._backend.open_request(len(context) + len(continuation)))
            logits = self._backend.prefill([(request, list(context)) for request in requests])
            rows = [[row] for row in logits]
            for step in range(max(map(len, continuations)) - 1):
                going = [i for i, continuation in enumerate(continuations) if len(continuation) > step + 1]
                logits = self._backend.decode([(requests[i], continuations[i][step]) for i in going])
                for i, row in zip(going, logits, strict=True):
                    rows[i].append(row)
        finally:
            for request in requests:
                self._backend.close_request(request)
        pairs = zip(rows, continuations, strict=True)
        return [_score(torch.stack(own).float().log_softmax(-1), continuation) for own, continuation in pairs]


def _score(likelihoods: Tensor, continuation: Sequence[int]) -> Score:
    """Score of a continuation from the FP32 log-probabilities [tokens, vocab] of its places."""
    targets = torch.tensor(list(continuation), device=likelihoods.device)
    total = likelihoods.gather(1, targets[:, None]).double().sum().item()
    if total != total:
        raise FutError("the model's likelihoods are not numbers")
    return Score(total, bool((likelihoods.argmax(-1) == targets).all()))


def _check(context: Sequence[int], continuations: Sequence[Sequence[int]], limit: int) -> None:
    if not context or not continuations or not all(continuations):
        raise FutError("a context and its continuations need at least one token each")
    longest = len(context) + max(map(len, continuations))
    if longest > limit:
        raise FutError(f"a context and its continuation have {longest} tokens, and the model has {limit} positions")
