"""From logits to the next token: parameters, filters and the draw.

The order is that of transformers: repetition penalty, temperature, top-k, top-p, min-p, then one draw. Every filter is
a pure function of logits [..., V] that sets what it removes to -inf and never removes a row's most probable token.
A request draws from its own generator, one number a token, so its tokens do not depend on the rest of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fut_runtime.backend import Draw
from fut_runtime.errors import FutError

#: Seeds that `torch.Generator.manual_seed` takes without wrapping.
MAX_SEED = 2**63 - 1
#: No vocabulary has more tokens.
MAX_TOP_K = 2**31 - 1


class SamplingError(FutError):
    """A sampling parameter is outside its range, or the logits are unusable."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses its tokens and when it stops.

    Attributes:
        max_new_tokens: most tokens to generate; None up to the model's context limit.
        temperature: 0 takes the most probable token (of equals, the lowest id); above 0 divides the logits.
        top_p: keep the smallest set of most probable tokens whose probability reaches this, 0 < top_p ≤ 1.
        top_k: keep this many most probable tokens, and those equal to the last of them; 0 keeps all.
        min_p: drop tokens less probable than this fraction of the most probable one; 0 keeps all.
        repetition_penalty: divides the positive and multiplies the negative logits of tokens that occur in the prompt
            or the output; 1 changes nothing, above 1 discourages repetition.
        seed: seed of this request's draws; None draws one from the operating system.
        stop: strings that end the output; they are not part of it.
        logprobs: report the log-probability of each token and of this many most probable ones (0: only of the token);
            None reports none. They are the model's own, before penalty, temperature and filters.
        ignore_eos: go on after the model's end tokens (for benchmarks).

    Raises:
        SamplingError: a value is outside its range.
    """

    max_new_tokens: int | None = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        self._check_int("max_new_tokens", self.max_new_tokens, 1, None, optional=True)
        self._check_float("temperature", self.temperature, lambda t: t >= 0, "at least 0")
        self._check_float("top_p", self.top_p, lambda p: 0 < p <= 1, "above 0 and at most 1")
        self._check_int("top_k", self.top_k, 0, None)
        self._check_float("min_p", self.min_p, lambda p: 0 <= p <= 1, "from 0 to 1")
        self._check_float("repetition_penalty", self.repetition_penalty, lambda r: r > 0, "above 0")
        self._check_int("seed", self.seed, 0, MAX_SEED, optional=True)
        self._check_int("logprobs", self.logprobs, 0, None, optional=True)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise SamplingError(f"stop holds {text!r}, expected non-empty strings")
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise SamplingError(f"stop holds {text!r}, which is not Unicode text and can never appear")

    @property
    def greedy(self) -> bool:
        """Whether every token is the most probable one."""
        return self.temperature == 0

    @property
    def ignored_when_greedy(self) -> tuple[str, ...]:
        """Names of parameters that are set but have no effect because temperature is 0."""
        names = {"top_p", "top_k", "min_p", "seed"} if self.greedy else set()
        return tuple(f.name for f in fields(self) if f.name in names and getattr(self, f.name) != f.default)

    def _check_int(self, name: str, value: object, low: int, high: int | None, *, optional: bool = False) -> None:
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            expected = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
            raise SamplingError(f"{name} is {value!r}, expected {expected}{' or None' if optional else ''}")

    def _check_float(self, name: str, value: object, within: Callable[[float], bool], expected: str) -> None:
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not within(value):  # type: ignore[arg-type]
            raise SamplingError(f"{name} is {value!r}, expected a number {expected}")


def apply_repetition_penalty(logits: Tensor, token_ids: Iterable[int], penalty: float) -> Tensor:
    """Penalise tokens that already occurred: positive logits are divided, negative ones multiplied.

    Args:
        logits: [V].
        token_ids: prompt and output so far; how often a token occurs does not matter.
        penalty: above 0; 1 returns the logits as they are.

    Source: Keskar et al., CTRL (2019), section 4.1.
    """
    seen = sorted(set(token_ids))
    if penalty == 1 or not seen:
        return logits
    index = torch.tensor(seen, device=logits.device)
    values = logits[index]
    result = logits.clone()
    result[index] = torch.where(values > 0, values / penalty, values * penalty)
    return result


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Logits [..., V] less their maximum, over the temperature: float64, so that a tiny temperature cannot overflow."""
    wide = logits.double()
    return (wide - wide.amax(dim=-1, keepdim=True)) / temperature


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k largest logits of each row [..., V], and those equal to the k-th; 0 keeps all."""
    if k <= 0 or k >= logits.shape[-1]:
        return logits
    kth = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < kth, -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the shortest prefix of the tokens sorted by probability whose mass is at least p (nucleus sampling).

    Of equally probable tokens those with the lower id come first.

    Source: Holtzman et al., The Curious Case of Neural Text Degeneration (2020), section 3.1.
    """
    if p >= 1:
        return logits
    ordered, index = logits.double().sort(dim=-1, descending=True, stable=True)
    probability = ordered.softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    drop = before >= p
    drop[..., 0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, index, drop), -math.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Drop tokens less probable than p times the most probable one of their row [..., V].

    Source: Nguyen et al., Turning Up the Heat: Min-p Sampling (2024), section 3.
    """
    if p <= 0:
        return logits
    threshold = logits.double().amax(dim=-1, keepdim=True) + math.log(p)
    return logits.masked_fill(logits < threshold, -math.inf)


def draw(logits: Tensor, uniform: float) -> int:
    """Token at quantile `uniform` in [0, 1) of softmax(logits [V]), in the order of token ids.

    Inverting the distribution function takes one random number whatever V is, and gives the same token on every device.
    """
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    index = torch.searchsorted(cumulative, cumulative[-1:] * uniform, right=True).item()
    # Rounding may leave the last steps flat: the token drawn must be one that was kept.
    last = int((logits > -math.inf).nonzero()[-1].item())
    return min(int(index), last)


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probability of the chosen token, and (token id, log-probability) of the most probable ones."""

    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """Log-probabilities under softmax(logits [V]): of `token`, and of the `count` most probable tokens."""
    values = logits.double().log_softmax(dim=-1)
    top = values.topk(min(count, values.shape[-1]))
    pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return TokenLogprobs(values[token].item(), pairs)


class Sampler:
    """Chooses the tokens of one request: its parameters, its generator and the tokens it has seen."""

    def __init__(self, params: SamplingParams, prompt_ids: Iterable[int]) -> None:
        self.params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)
        self._seen = set(prompt_ids) if params.repetition_penalty != 1 else set()
        self._uniform: float | None = None

    def draw(self) -> Draw | None:
        """How a backend may choose the next token; None where the choice needs the logits here.

        The random number is the one that `choose` would use. It stays this token's until `drawn` or `choose`.
        """
        params = self.params
        if params.repetition_penalty != 1 or params.logprobs is not None:
            return None
        if params.greedy:
            return Draw()
        return Draw(params.temperature, min(params.top_k, MAX_TOP_K), params.top_p, params.min_p, self._next_uniform())

    def drawn(self) -> None:
        """A backend has chosen the token of the last `draw`."""
        self._uniform = None

    def choose(self, logits: Tensor) -> tuple[int, TokenLogprobs | None]:
        """Next token from float32 logits [V], and its log-probabilities where the request asks for them.

        Raises:
            SamplingError: a logit is NaN or +inf, or all are -inf.
        """
        if not math.isfinite(logits.max().item()):
            raise SamplingError(
                "the model returned logits that are not finite; the artifact may be damaged (fut-artifact verify), "
                "or its activations overflow"
            )
        params = self.params
        scores = apply_repetition_penalty(logits, self._seen, params.repetition_penalty)
        if params.greedy:
            token = int(scores.argmax().item())
        else:
            scores = apply_temperature(scores, params.temperature)
            scores = keep_min_p(keep_top_p(keep_top_k(scores, params.top_k), params.top_p), params.min_p)
            token = draw(scores, self._next_uniform())
        self._uniform = None
        if params.repetition_penalty != 1:
            self._seen.add(token)
        return token, None if params.logprobs is None else token_logprobs(logits, token, params.logprobs)

    def _next_uniform(self) -> float:
        """The random number in [0, 1) of the token that comes next, the same until that is chosen."""
        if self._uniform is None:
            self._uniform = torch.rand((), generator=self._generator, dtype=torch.float64).item()
        return self._uniform
