"""The state of one request while it generates: its tokens, its text, and whether it is finished."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fut_runtime.backend import Draw
from fut_runtime.detokenize import StopStrings
from fut_runtime.results import Completion, FinishReason, TokenEvent
from fut_runtime.sampling import Sampler, SamplingParams, TokenLogprobs
from fut_runtime.tokenizer import Tokenizer


@dataclass
class KeptCache:
    """A backend request that outlives one generation, so that a prompt which extends its tokens need not be re-read.

    Attributes:
        handle: the backend's handle; None while there is no such request, or a generation is using it.
        tokens: what its cache holds.
        capacity: how many tokens it can hold.
    """

    handle: int | None = None
    tokens: list[int] = field(default_factory=list)
    capacity: int = 0

    def covers(self, prompt_ids: Sequence[int], capacity: int) -> bool:
        """Whether this cache holds a true beginning of the prompt and has room for what follows."""
        held = len(self.tokens)
        return (
            self.handle is not None
            and capacity <= self.capacity
            and held < len(prompt_ids)
            and list(prompt_ids[:held]) == self.tokens
        )


class Request:
    """One prompt on its way to a completion.

    Attributes:
        handle: the backend's handle, once opened.
        fed: how many tokens of prompt and output the backend holds.
        capacity: most tokens the backend will have to hold.
    """

    def __init__(
        self,
        index: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        limit: int,
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        continues: bool,
        cache: KeptCache | None,
    ) -> None:
        """Prepare a request.

        Args:
            limit: most tokens that the context leaves room for.
            continues: the output continues the prompt's text, and so keeps the space before its first word.
            cache: a kept cache to use and to leave behind.
        """
        self.index = index
        self.prompt_ids = list(prompt_ids)
        self.params = params
        self.cache = cache
        self.handle: int | None = None
        self.fed = 0
        self.cached_tokens = 0
        self.output_ids: list[int] = []
        self.capacity = len(self.prompt_ids) + min(limit, params.max_new_tokens or limit)
        self.finish_reason: FinishReason | None = None
        self._limit = limit
        self._eos_ids = frozenset() if params.ignore_eos else eos_ids
        # A stop string that is a special token never shows in the text; its id is what to look for.
        special = {} if tokenizer is None else {tokenizer.token_id(s): s for s in params.stop}
        self._stop_ids = {i: s for i, s in special.items() if tokenizer is not None and i in tokenizer.special_ids}
        self._sampler = Sampler(params, self.prompt_ids)
        self._detokenizer = None if tokenizer is None else tokenizer.detokenizer(prompt_ids if continues else ())
        self._stop_strings = StopStrings(params.stop)
        self._stop: str | None = None
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._submitted = self._last = time.perf_counter()
        self._first: float | None = None

    @property
    def prefilled(self) -> bool:
        """Whether the backend holds the whole prompt."""
        return self.fed >= len(self.prompt_ids)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output."""
        return self.prompt_ids + self.output_ids

    def draw(self) -> Draw | None:
        """How the backend may choose the next token; None where the choice needs the logits here."""
        return self._sampler.draw()

    def advance(self, logits: Tensor, token: int | None = None) -> TokenEvent:
        """Take the next token and bring text and finish reason up to date.

        Args:
            logits: float32 [V] to choose from.
            token: the one that the backend has chosen already, as `draw` says.
        """
        logprobs = None
        if token is None:
            token, logprobs = self._sampler.choose(logits)
        else:
            self._sampler.drawn()
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last
        self.output_ids.append(token)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        text = self._text_of(token)
        self._texts.append(text)
        return TokenEvent(self.index, token, text, logprobs, self.completion() if self.finish_reason else None)

    def completion(self) -> Completion:
        """What has been generated so far, as a result; a request that is not finished counts as cancelled."""
        return Completion(
            index=self.index,
            text="".join(self._texts),
            token_ids=tuple(self.output_ids),
            finish_reason=self.finish_reason or "cancelled",
            stop=self._stop,
            logprobs=tuple(self._logprobs) if self.params.logprobs is not None else None,
            prompt_tokens=len(self.prompt_ids),
            cached_tokens=self.cached_tokens,
            time_to_first_token_s=None if self._first is None else self._first - self._submitted,
            decode_s=0.0 if self._first is None else self._last - self._first,
        )

    def _text_of(self, token: int) -> str:
        """Text that `token` makes certain; sets the finish reason."""
        text = ""
        if token in self._eos_ids:
            self.finish_reason = "eos"
        elif token in self._stop_ids:
            self.finish_reason, self._stop = "stop", self._stop_ids[token]
        else:
            text = self._until_stop(self._detokenizer.push(token)) if self._detokenizer else ""
            if self._stop is not None:
                return text
            if len(self.output_ids) == self.params.max_new_tokens:
                self.finish_reason = "length"
            elif len(self.output_ids) >= self._limit:
                self.finish_reason = "context"
        if self.finish_reason is not None and self._detokenizer:
            text += self._until_stop(self._detokenizer.flush()) + self._stop_strings.flush()
        return text

    def _until_stop(self, text: str) -> str:
        shown, stop = self._stop_strings.push(text)
        if stop is not None:
            self.finish_reason, self._stop = "stop", stop
        return shown
