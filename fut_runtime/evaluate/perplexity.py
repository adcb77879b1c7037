"""Perplexity of a text, and divergence from a baseline, with standard errors taken over windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from fut_runtime.errors import FutError
from fut_runtime.evaluate.runner import LogitsRunner, WindowRunner, window_logits

#: Positions whose logits exist at a time: bounds memory at this many rows of the vocabulary.
LOGIT_ROWS = 256

Runner = WindowRunner | LogitsRunner


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
    runner: Runner,
    windows: Tensor,
    *,
    baseline: Runner | None = None,
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


def _score(runner: Runner, baseline: Runner | None, window: Tensor) -> Tensor:
    """Means over one window's predicted positions, FP64 on the CPU: nll, baseline nll, KL, top-1 agreement."""
    scores = score_positions(runner, baseline, window)
    same = scores.top == scores.baseline_top
    return torch.stack([x.double().mean() for x in (scores.nll, scores.baseline_nll, scores.kl, same)])


@dataclass(frozen=True)
class PositionScores:
    """Of each predicted position of a window, on the CPU; the baseline's are zero where there is none.

    Attributes:
        nll, baseline_nll: FP32 [tokens - 1], negative log-likelihood of the token that follows.
        kl: FP32 [tokens - 1], KL(baseline || ours).
        top, baseline_top: int64 [tokens - 1], the most likely token.
    """

    nll: Tensor
    baseline_nll: Tensor
    kl: Tensor
    top: Tensor
    baseline_top: Tensor


@torch.inference_mode()
def score_positions(runner: Runner, baseline: Runner | None, window: Tensor) -> PositionScores:
    """Score every position of a window int64 [tokens] that has a token after it."""
    reference = None if baseline is None else window_logits(baseline, window, LOGIT_ROWS)
    parts = []
    spans = zip(window_logits(runner, window, LOGIT_ROWS), window[1:, None].split(LOGIT_ROWS), strict=True)
    for logits, following in spans:
        target = following.to(logits.device)
        ours = logits.log_softmax(-1)
        nll, top = -ours.gather(1, target)[:, 0], ours.argmax(-1)
        base_nll, kl, base_top = torch.zeros_like(nll), torch.zeros_like(nll), torch.zeros_like(top)
        if reference is not None:
            theirs = next(reference).log_softmax(-1)
            base_nll, base_top = -theirs.gather(1, target)[:, 0], theirs.argmax(-1)
            kl = (theirs.exp() * (theirs - ours)).sum(-1)
        parts.append((nll, base_nll, kl, top, base_top))
    return PositionScores(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))
