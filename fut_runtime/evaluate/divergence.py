"""How far a model is from a baseline on a text: token by token, along the window, and where it is farthest."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fut_runtime.errors import FutError
from fut_runtime.evaluate.perplexity import Estimate, PositionScores, Runner, score_positions

#: Shares of the tokens below whose greatest KL the report gives.
QUANTILES: tuple[float, ...] = (0.5, 0.9, 0.99, 0.999)


@dataclass(frozen=True)
class Divergence:
    """Over some positions of every window; standard errors are taken over windows.

    Attributes:
        positions: first and last predicted position of the window, counted from 1: position i predicts token i.
        kl: KL(baseline || ours), nats a token.
        top1: share of positions where both have the same most likely token.
        nll_difference: our negative log-likelihood minus the baseline's, nats a token, paired by window.
    """

    positions: tuple[int, int]
    kl: Estimate
    top1: Estimate
    nll_difference: Estimate


@dataclass(frozen=True)
class WorstToken:
    """One of the positions of the greatest KL.

    Attributes:
        window, position: where; token `position` of the window is the one that was predicted.
        context: the token ids just before it.
        token: the token that follows there.
        top, baseline_top: what each model thought most likely.
    """

    kl: float
    window: int
    position: int
    context: tuple[int, ...]
    token: int
    nll: float
    baseline_nll: float
    top: int
    baseline_top: int


@dataclass(frozen=True)
class DivergenceResult:
    """Divergence over `windows` windows of `window_tokens` tokens.

    Attributes:
        perplexity, baseline_perplexity: of each model, over every token but each window's first.
        overall: all positions.
        kl_quantiles: share of all tokens -> the KL that so many do not exceed; 1 is the greatest.
        buckets: the positions in parts of equal length, from the beginning of the window to its end.
        worst: positions of the greatest KL, the greatest first.
    """

    windows: int
    window_tokens: int
    perplexity: float
    baseline_perplexity: float
    overall: Divergence
    kl_quantiles: dict[str, float]
    buckets: tuple[Divergence, ...] = ()
    worst: tuple[WorstToken, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """JSON-ready form."""
        return asdict(self)


def evaluate_divergence(
    runner: Runner,
    baseline: Runner,
    windows: Tensor,
    *,
    buckets: int = 0,
    worst: int = 0,
    context_tokens: int = 16,
    progress: Callable[[int, float], None] | None = None,
) -> DivergenceResult:
    """Score windows int64 [windows, tokens] with both models.

    Args:
        buckets: parts that the positions are divided into; 0 for none.
        worst: positions of the greatest KL to list.
        context_tokens: tokens before each of these that are kept to show.
        progress: called after each window with its index and the mean KL so far.

    Raises:
        FutError: more buckets than positions, or likelihoods that are not finite; the message names the window.
    """
    positions = windows.shape[1] - 1
    if buckets > positions:
        raise FutError(f"{buckets} buckets for {positions} positions a window: give fewer, or longer windows")
    rows: list[PositionScores] = []
    farthest: list[tuple[float, int, int]] = []
    for index, window in enumerate(windows):
        scores = score_positions(runner, baseline, window)
        if not all(bool(x.isfinite().all()) for x in (scores.nll, scores.baseline_nll, scores.kl)):
            raise FutError(f"window {index}: a model's likelihoods are not finite")
        rows.append(scores)
        kl, places = scores.kl.topk(min(worst, positions))
        farthest += zip(kl.tolist(), [index] * len(places), places.tolist(), strict=True)
        if progress is not None:
            progress(index, torch.stack([row.kl.mean() for row in rows]).mean().item())
    kl, difference, same, nll, base = (
        torch.stack(columns).double()
        for columns in zip(
            *((r.kl, r.nll - r.baseline_nll, r.top == r.baseline_top, r.nll, r.baseline_nll) for r in rows),
            strict=True,
        )
    )

    def over(first: int, stop: int) -> Divergence:
        estimates = (Estimate.of(x[:, first:stop].mean(dim=1)) for x in (kl, same, difference))
        return Divergence((first + 1, stop), *estimates)

    edges = [positions * i // buckets for i in range(buckets + 1)] if buckets else []
    return DivergenceResult(
        windows=len(windows),
        window_tokens=windows.shape[1],
        perplexity=nll.mean().exp().item(),
        baseline_perplexity=base.mean().exp().item(),
        overall=over(0, positions),
        kl_quantiles=_quantiles(kl.flatten()),
        buckets=tuple(over(a, b) for a, b in pairwise(edges)),
        worst=tuple(
            _worst(windows[w], w, place, rows[w], context_tokens) for _, w, place in heapq.nlargest(worst, farthest)
        ),
    )


def _quantiles(kl: Tensor) -> dict[str, float]:
    """The KL that each share of the tokens does not exceed. torch.quantile refuses more than 16 million."""
    ordered = kl.sort().values
    count = len(ordered)
    return {f"{share:g}": ordered[math.ceil(share * count) - 1].item() for share in (*QUANTILES, 1.0)}


def _worst(window: Tensor, index: int, place: int, scores: PositionScores, context_tokens: int) -> WorstToken:
    return WorstToken(
        kl=scores.kl[place].item(),
        window=index,
        position=place + 1,
        context=tuple(window[max(0, place + 1 - context_tokens) : place + 1].tolist()),
        token=int(window[place + 1]),
        nll=scores.nll[place].item(),
        baseline_nll=scores.baseline_nll[place].item(),
        top=int(scores.top[place]),
        baseline_top=int(scores.baseline_top[place]),
    )
