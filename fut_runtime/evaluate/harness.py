"""An artifact as a model of EleutherAI's lm-eval: `EngineLM`. Importing this module needs the extra `eval`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from fut_runtime.engine import Engine
from fut_runtime.errors import FutError
from fut_runtime.evaluate.continuations import BackendScorer, Scorer
from fut_runtime.sampling import SamplingParams
from fut_runtime.tokenizer import Tokenizer

#: What lm-eval's own models generate where a task sets no limit.
_DEFAULT_NEW_TOKENS = 256
_LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class EngineLM(LM):  # type: ignore[misc]
    """Answers lm-eval's three kinds of request with an engine.

    Texts are tokenised as prompts are, with the BOS that the tokenizer asks for. What does not fit the model's
    positions loses its beginning, as in lm-eval's own models; `truncated` counts it.
    """

    def __init__(
        self, engine: Engine, scorer: Scorer | None = None, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Wrap an engine with a tokenizer.

        Args:
            scorer: computes log-likelihoods; None takes prefill for the context and decode steps after it, which any
                backend can do.
            progress: called as progress(done, total) while log-likelihoods are computed.

        Raises:
            FutError: the engine has no tokenizer.
        """
        super().__init__()
        if engine.tokenizer is None:
            raise FutError("lm-eval asks with texts, and this artifact has no tokenizer (tokenizer.json)")
        self.engine = engine
        self.truncated = 0
        self._tokenizer: Tokenizer = engine.tokenizer
        self._scorer = scorer or BackendScorer(engine.backend)
        self._progress = progress or (lambda *_: None)

    @property
    def tokenizer_name(self) -> str:
        """Name under which lm-eval caches requests."""
        return "engine" if self.engine.path is None else self.engine.path.name

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without a context: BOS, or the end token where there is none."""
        token = self._tokenizer.bos_token_id
        token = self._tokenizer.eos_token_id if token is None else token
        if token is None:
            raise FutError("the tokenizer names neither a BOS nor an end token to begin an empty context with")
        return token

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Log-likelihood of each (context, continuation), and whether greedy decoding gives it.

        Neighbouring requests of one context, as multiple choice makes them, share its pass through the model.
        """
        pairs = [self._encode_pair(*request.args) for request in requests]
        results: list[tuple[float, bool]] = []
        for context, group in groupby(pairs, key=lambda pair: pair[0]):
            continuations = [continuation for _, continuation in group]
            excess = max(0, len(context) + max(map(len, continuations)) - self._scorer.max_tokens)
            self.truncated += len(continuations) if excess else 0
            for score in self._scorer.score(context[excess:], continuations):
                results.append((score.log_likelihood, score.greedy))
            self._progress(len(results), len(pairs))
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, result)
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log-likelihood of each whole text, in windows as long as the model's positions."""
        totals = []
        for index, request in enumerate(requests):
            ids = self._tokenizer.encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self._scorer.max_tokens - 1, 1)
            total = 0.0
            for context, continuation in map(make_disjoint_window, windows):
                total += self._scorer.score(context, [continuation])[0].log_likelihood
            totals.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            self._progress(index + 1, len(requests))
        return totals

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Text that follows each context, up to a stop text of `until` or the limit of tokens; one batch."""
        prompts, params = [], []
        for request in requests:
            context, options = request.args
            params.append(_sampling(options))
            ids = self._tokenizer.encode(context) or [self.prefix_token_id]
            limit = self.engine.backend.max_context_tokens
            room = limit - min(params[-1].max_new_tokens or limit, limit // 2)
            self.truncated += len(ids) > room
            prompts.append(ids[-room:])
        texts = [completion.text for completion in self.engine.generate(prompts, params)]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the model's chat template writes it."""
        template = self._tokenizer.chat_template
        if template is None:
            raise FutError("this model has no chat template")
        return template.render(chat_history, add_generation_prompt=add_generation_prompt)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of a context and of what follows it, cut where the tokens of the context alone end.

        Spaces that end the context belong to the continuation: tokenizers join them with the word after.
        """
        if not context:
            ids = self._tokenizer.encode(continuation, add_special_tokens=False)
            prefix = [self.prefix_token_id]
            return (prefix, ids[1:]) if ids[:1] == prefix and len(ids) > 1 else (prefix, ids)
        spaces = len(context) - len(context.rstrip())
        if spaces and spaces < len(context):
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        ids = self._tokenizer.encode(context)
        following = self._tokenizer.encode(context + continuation)[len(ids) :]
        # Joined, both may have no more tokens than the context alone.
        return ids, following or self._tokenizer.encode(continuation, add_special_tokens=False)


def _sampling(options: dict[str, Any]) -> SamplingParams:
    """Sampling parameters of a request's generation options; options that ours has no counterpart of are refused."""
    given = dict(options)
    until = given.pop("until", None) or []
    lengths = [value for name in _LENGTH_NAMES if (value := given.pop(name, None)) is not None]
    sampled = given.pop("do_sample", None)
    temperature = float(given.pop("temperature", None) or (1.0 if sampled else 0.0))
    if sampled is False:
        temperature = 0.0
    known = {
        name: given.pop(name) for name in ("top_p", "top_k", "min_p", "repetition_penalty", "seed") if name in given
    }
    if given:
        raise FutError(f"generation option {', '.join(sorted(given))} has no counterpart in this engine")
    stop = [until] if isinstance(until, str) else [text for text in until if text]
    return SamplingParams(
        max_new_tokens=lengths[0] if lengths else _DEFAULT_NEW_TOKENS,
        temperature=temperature,
        stop=tuple(stop),
        **known,
    )
