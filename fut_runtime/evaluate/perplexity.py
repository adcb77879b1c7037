"""Perplexity of a text, and divergence from a baseline, with standard errors taken over windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from fut_runtime.errors import FutError
from fut_runtime.evaluate.runner import WindowRunner

#: Positions whose logits exist at a time: bounds memory at this many rows of the vocabulary.
LOGIT_ROWS = 256


@dataclass(frozen=True)
class Estimate:
    """A mean over windows and its standard error (NaN for a single window)."""

    mean: float
    standard_error: float

    @classmethod
    def of(cls, values: Tensor) -> Estimate:
        """Mean and standard error of per-window values [windows]."""
        values = values.double()
        error = values.std(unbiased=True).item() / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(values.mean().item(), error)


@dataclass(frozen=True)
class PerplexityResult:
    """Figures of one run over `windows` windows of `window_tokens` tokens.

    Attributes:
        perplexity: exp of the mean negative log-likelihood of every token but each window's first.
        nll: that mean, nats a token, with its standard error over windows.
        baseline_perplexity: the same for the baseline.
        nll_difference: ours minus the baseline's, paired by window.
        kl: mean KL(baseline || ours), nats a token.
        top1: share of positions where both have the same most likely token.
    """

    windows: int
    window_tokens: int
    perplexity: float
    nll: Estimate
    baseline_perplexity: float | None = None
    nll_difference: Estimate | None = None
    kl: Estimate | None = None
    top1: Estimate | None = None

    def to_dict(self) -> dict[str, object]:
        """JSON-ready form."""
        return asdict(self)


@torch.inference_mode()
def evaluate_perplexity(
    runner: WindowRunner,
    windows: Tensor,
    *,
    baseline: WindowRunner | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> PerplexityResult:
    """Score windows int64 [windows, tokens].

    Args:
        baseline: model to measure divergence from; it sees the same windows.
        progress: called after each window with its index and the perplexity so far.

    Raises:
        FutError: the model's likelihoods are not finite; the message names the window.
    """
    rows: list[Tensor] = []
    for index, window in enumerate(windows):
        rows.append(_score(runner, baseline, window))
        if not bool(rows[-1].isfinite().all()):
            raise FutError(f"window {index}: the model's likelihoods are not finite")
        if progress is not None:
            progress(index, _exp(torch.stack(rows)[:, 0].mean()))
    nll, base, kl, top1 = torch.stack(rows).unbind(1)
    result = PerplexityResult(len(windows), windows.shape[1], _exp(nll.mean()), Estimate.of(nll))
    if baseline is None:
        return result
    return PerplexityResult(
        result.windows,
        result.window_tokens,
        result.perplexity,
        result.nll,
        baseline_perplexity=_exp(base.mean()),
        nll_difference=Estimate.of(nll - base),
        kl=Estimate.of(kl),
        top1=Estimate.of(top1),
    )


def _exp(nll: Tensor) -> float:
    """exp of one FP64 number; infinity, and no error, where it is beyond that type."""
    return nll.exp().item()


def _score(runner: WindowRunner, baseline: WindowRunner | None, window: Tensor) -> Tensor:
    """Means over one window's predicted positions, FP64 on the CPU: nll, baseline nll, KL, top-1 agreement."""
    hidden = runner.hidden(window)
    reference = None if baseline is None else baseline.hidden(window)
    targets = window.to(hidden.device)[1:]
    totals = torch.zeros(4, dtype=torch.float64, device=hidden.device)
    for first in range(0, len(targets), LOGIT_ROWS):
        span = slice(first, min(first + LOGIT_ROWS, len(targets)))
        target = targets[span, None]
        ours = runner.logits(hidden[span]).float().log_softmax(-1)
        totals[0] -= ours.gather(1, target).double().sum()
        if baseline is not None and reference is not None:
            theirs = baseline.logits(reference[span]).float().log_softmax(-1)
            totals[1] -= theirs.gather(1, target).double().sum()
            totals[2] += (theirs.exp() * (theirs - ours)).sum(-1).double().sum()
            totals[3] += (theirs.argmax(-1) == ours.argmax(-1)).sum()
    return (totals / len(targets)).cpu()
