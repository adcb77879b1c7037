"""The device sampler's arithmetic in NumPy, one row at a time: docs/numerics.md, "Sampling on the device".

Whole numbers take the place of probabilities, so that no sum depends on its order. It sorts the whole row where the
kernel narrows histograms down; the token is the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: What the most probable token weighs: 2^18 tokens of this weight sum to less than 2^64.
TOP_WEIGHT = 2**45

Weights = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class DeviceSampling:
    """`fut_sampling` of csrc/fut.h: single precision but for the random number."""

    uniform: float = 0.0
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0

    def rounded(self) -> DeviceSampling:
        """The same with the values that the structure can hold."""
        single = [float(np.float32(v)) for v in (self.temperature, self.top_p, self.min_p)]
        return DeviceSampling(self.uniform, *single, self.top_k)


def weights(logits: npt.NDArray[np.float32], temperature: float) -> Weights:
    """Softmax [V] in fixed point, unnormalised: round(2^45 · exp((x − max) / T)), ties to even.

    The kernel takes its powers from a table and a polynomial, so a weight may be one off this one.
    """
    with np.errstate(over="ignore"):
        exponent = distances(logits) * (1.0 / temperature)
    return np.rint(np.exp(exponent) * TOP_WEIGHT).astype(np.uint64)


def distances(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """x − max [V] in float64."""
    wide = logits.astype(np.float64)
    return wide - wide.max()


def kept_weights(logits: npt.NDArray[np.float32], sampling: DeviceSampling) -> Weights:
    """Weights [V] after top-k, top-p and min-p: zero for a token that was dropped, or is too improbable to weigh."""
    weight = weights(logits, sampling.temperature)
    order = np.lexsort((np.arange(len(logits)), -logits.astype(np.float64)))
    order = order[weight[order] > 0]
    if 0 < sampling.top_k < len(order):
        order = order[logits[order] >= logits[order[sampling.top_k - 1]]]
    if sampling.top_p < 1:
        running = [int(w) for w in np.cumsum(weight[order], dtype=np.uint64)]
        limit = max(1, -(-_fraction(sampling.top_p) * running[-1] // 2**64))
        order = order[: 1 + next(i for i, r in enumerate(running) if r >= limit)]
    if sampling.min_p > 0:
        order = order[distances(logits)[order] >= min(math.log(sampling.min_p), 0.0) * sampling.temperature]
    result = np.zeros(len(logits), np.uint64)
    result[order] = weight[order]
    return result


def sample(logits: npt.NDArray[np.float32], sampling: DeviceSampling) -> int:
    """Token for logits [V]; −1 where one is NaN or +inf, or all are −inf."""
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        return -1
    if not sampling.temperature > 0:
        return int(logits.argmax())
    running = np.cumsum(kept_weights(logits, sampling), dtype=np.uint64)
    target = _fraction(sampling.uniform) * int(running[-1]) >> 64
    return int(np.searchsorted(running, np.uint64(target), side="right"))


def _fraction(share: float) -> int:
    """A share of a total in units of 2^-64, rounded down."""
    return int(share * 2.0**64)
