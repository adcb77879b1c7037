"""Scales of INT4 groups: from the absolute maximum, or by searching for the least (weighted) squared error.

Codes span the full signed range -8..7 and a scale may be negative, so a group may give the extra code to either sign.
Every scale is rounded to its storage type before codes are chosen with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fut_convert.errors import ConvertError
from fut_convert.quantize.finite import require_finite
from fut_convert.quantize.rtn import HIGHEST, LOWEST, nonzero_divisor
from fut_runtime.reference.numerics import true_divide

SCALE_METHODS: tuple[str, ...] = ("absmax_7", "absmax_7.5", "search", "weighted_search")
_DIVISORS: dict[str, float] = {"absmax_7": 7.0, "absmax_7.5": 7.5}

#: Scales tried, as multiples of the group's absolute maximum over 7.5: from clipping three quarters of the range (a
#: large weight whose channel hardly ever carries anything) to leaving two codes of either sign unused. Coarse steps for
#: both signs, then finer ones around the best. On a real model seven times as many steps gain nothing more.
_COARSE = tuple(0.25 + 0.05 * i for i in range(24))
_FINE = (-0.025, 0.025)
#: Rounds of alternating between the best scale for the codes and the best codes for the scale. It converges quickly.
_REFINEMENTS = 3
#: Exponent of the unweighted search's error, and the scales it tries as multiples of the least squares' one.
_PLAIN_EXPONENT = 2.4
_NEARBY = tuple(0.80 + 0.02 * i for i in range(26))
#: Weights handled at once. On a CPU the handful of temporaries stays in the caches.
_CHUNK_CPU = 1 << 17
_CHUNK_GPU = 1 << 27


class ScaleRangeError(ConvertError):
    """A scale does not fit in its storage type."""


def search_chunk(device: torch.device) -> int:
    """Weights whose scales are searched at once."""
    return _CHUNK_CPU if device.type == "cpu" else _CHUNK_GPU


def int4_scales(
    weight: Tensor,
    group_size: int,
    method: str,
    *,
    second_moment: Tensor | None = None,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Choose one scale for each group of neighbouring weights of a row: weight ≈ q · scale, q in -8..7.

    `absmax_7` divides the group's absolute maximum by 7, `absmax_7.5` by 7.5. `search` minimises
    Σ |w - q·scale|^2.4 over scale and codes, `weighted_search` Σ E[x²] (w - q·scale)², the diagonal part of the error
    of the layer's output.

    Args:
        weight: float32 [out, in], `in` a multiple of `group_size`.
        group_size: neighbouring weights of a row that share a scale.
        method: one of SCALE_METHODS.
        second_moment: [in], mean square of each input channel as it enters the product; `weighted_search` needs it.
        scale_dtype: torch.bfloat16 or torch.float16.

    Returns:
        [out, in / group_size] in `scale_dtype`; 0 for a group of zeros.

    Raises:
        NonFiniteWeightError: a weight is NaN or infinite.
        ScaleRangeError: a scale overflows `scale_dtype`.
        ValueError: unknown method, or a second moment that is missing, of the wrong shape, negative or not finite.
    """
    if method not in SCALE_METHODS:
        raise ValueError(f"scale method {method!r} is unknown, expected one of {SCALE_METHODS}")
    groups = weight.unflatten(1, (-1, group_size))
    maxima = torch.maximum(groups.amax(dim=-1), -groups.amin(dim=-1))
    require_finite(weight, maxima)
    if method in _DIVISORS:
        scales = true_divide(maxima, _DIVISORS[method]).to(scale_dtype)
    else:
        importance = None
        if method == "weighted_search":
            importance = _importance(second_moment, weight.shape[1], group_size).to(weight.device)
        rows = max(1, search_chunk(weight.device) // weight.shape[1])
        scales = torch.cat(
            [
                _search(g, m, importance, scale_dtype)
                for g, m in zip(groups.split(rows), maxima.split(rows), strict=True)
            ]
        )
    return require_scale_range(scales, maxima)


def require_scale_range(scales: Tensor, weight: Tensor) -> Tensor:
    """The scales, all of which fit their storage type; `weight` holds the weights or their maxima.

    Raises:
        ScaleRangeError: a scale overflowed.
    """
    if not bool(torch.isfinite(scales).all()):
        raise ScaleRangeError(
            f"the largest weight, {weight.abs().max().item():g}, needs a scale beyond {scales.dtype}; "
            "choose scale_dtype bfloat16"
        )
    return scales


def _importance(second_moment: Tensor | None, columns: int, group_size: int) -> Tensor:
    """Weight of each column's squared error, float32 [in / group, group], at most 1 in each group."""
    if second_moment is None or second_moment.shape != (columns,):
        found = None if second_moment is None else list(second_moment.shape)
        raise ValueError(f"weighted_search needs the second moment of each of the {columns} inputs, found {found}")
    groups = second_moment.to(torch.float32).view(-1, group_size)
    if not bool(torch.isfinite(groups).all()) or bool((groups < 0).any()):
        raise ValueError("the second moments hold negative or non-finite values")
    largest = groups.amax(dim=-1, keepdim=True)
    # A group that calibration never saw active counts all of its columns alike.
    return torch.where(largest > 0, groups / largest.clamp_min(torch.finfo(torch.float32).tiny), 1.0)


def _search(groups: Tensor, maxima: Tensor, importance: Tensor | None, scale_dtype: torch.dtype) -> Tensor:
    """Scales of least error for groups float32 [rows, groups, group_size]: [rows, groups] in `scale_dtype`.

    The error is not convex in the scale, so a grid finds the right valley and alternating least squares its floor.
    """
    fit = _Fit(groups, importance)
    unit = true_divide(maxima, _DIVISORS["absmax_7.5"])
    gain = torch.zeros_like(maxima)
    found = torch.zeros_like(maxima)
    place = torch.ones_like(maxima)
    for sign in (1.0, -1.0):
        for ratio in _COARSE:
            gain, found, place = fit.better(unit, torch.full_like(maxima, sign * ratio), gain, found, place)
    centre = place
    for step in _FINE:
        gain, found, place = fit.better(unit, centre + step, gain, found, place)

    best = true_divide(maxima, _DIVISORS["absmax_7"]).to(scale_dtype)
    error = fit.error(best)
    candidate = found
    for _ in range(_REFINEMENTS):
        rounded = candidate.to(scale_dtype)
        rounded_error = fit.error(rounded)
        wins = rounded_error < error
        best = torch.where(wins, rounded, best)
        error = torch.where(wins, rounded_error, error)
        _, candidate = fit.least_squares(best.to(torch.float32))
    return _refine_plain(fit, best, maxima) if importance is None else best


def _refine_plain(fit: _Fit, start: Tensor, maxima: Tensor) -> Tensor:
    """Move scales to the least Σ |w - q·scale|^2.4 near the least squares: what clipping costs counts for more.

    With nothing known of the activations this exponent predicts the model's loss better than squares do.
    """
    best, centre = start, start.to(torch.float32)
    error = fit.plain_error(best, maxima)
    absmax = true_divide(maxima, _DIVISORS["absmax_7"])
    for scale in (absmax, *(centre * ratio for ratio in _NEARBY)):
        candidate = scale.to(best.dtype)
        candidate_error = fit.plain_error(candidate, maxima)
        wins = candidate_error < error
        best, error = torch.where(wins, candidate, best), torch.where(wins, candidate_error, error)
    return best


class _Fit:
    """Groups float32 [rows, groups, group_size] and the importance of their columns, or None for equal ones."""

    def __init__(self, groups: Tensor, importance: Tensor | None) -> None:
        self.groups = groups
        self.importance = importance
        self.weighted = groups if importance is None else groups * importance

    def _sum(self, x: Tensor) -> Tensor:
        """Importance-weighted sum over each group; overwrites x."""
        return (x if self.importance is None else x.mul_(self.importance)).sum(dim=-1)

    def _levels(self, scale: Tensor) -> Tensor:
        return (self.groups / nonzero_divisor(scale)[..., None]).round_().clamp_(LOWEST, HIGHEST)

    def _difference(self, scale: Tensor) -> Tensor:
        scale = scale.to(torch.float32)
        return self._levels(scale).mul_(scale[..., None]).sub_(self.groups)

    def error(self, scale: Tensor) -> Tensor:
        """Weighted squared error of rounding with a scale, [rows, groups]."""
        return self._sum(self._difference(scale).square_())

    def plain_error(self, scale: Tensor, maxima: Tensor) -> Tensor:
        """Unweighted error to the power of 2.4, relative to each group's absolute maximum, [rows, groups]."""
        relative = self._difference(scale).div_(nonzero_divisor(maxima)[..., None])
        return relative.abs_().pow_(_PLAIN_EXPONENT).sum(dim=-1)

    def least_squares(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """For the codes that `scale` gives: the error's decrease by the scale that suits them best, and that scale.

        Σ h (w - s·q)² = Σ h w² - 2s·Σ h w q + s²·Σ h q² is least at s = Σhwq / Σhq², and there (Σhwq)² / Σhq² below
        Σ h w².
        """
        levels = self._levels(scale)
        product = (self.weighted * levels).sum(dim=-1)
        square = self._sum(levels.square_())
        best = torch.where(square > 0, product / square, 0)
        return product * best, best

    def better(
        self, unit: Tensor, ratio: Tensor, gain: Tensor, found: Tensor, place: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keep, group by group, the better of what was found so far and of the codes at scale ratio · unit."""
        new_gain, new_scale = self.least_squares(unit * ratio)
        wins = new_gain > gain
        return (
            torch.where(wins, new_gain, gain),
            torch.where(wins, new_scale, found),
            torch.where(wins, ratio, place),
        )
