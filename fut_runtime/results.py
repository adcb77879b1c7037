"""What generation returns: an event a token, and a completion at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fut_runtime.sampling import TokenLogprobs

#: Why a request ended: an end token of the model, a stop string, `max_new_tokens`, the model's context, its user.
FinishReason = Literal["eos", "stop", "length", "context", "cancelled"]


@dataclass(frozen=True)
class Completion:
    """One finished request.

    Attributes:
        index: position of its prompt among those submitted together.
        text: the output, without special tokens and without the stop string.
        token_ids: generated tokens, the one that ended the text included.
        finish_reason: see `FinishReason`.
        stop: the stop string that ended the text, if one did.
        logprobs: one entry a token, where asked for.
        prompt_tokens: tokens of the prompt.
        cached_tokens: how many of them a kept cache held already.
        time_to_first_token_s: seconds from submission to the first token.
        decode_s: seconds from the first token to the last.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: str | None
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_tokens: int
    cached_tokens: int
    time_to_first_token_s: float | None
    decode_s: float

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens a second after the first one; None where there is no second token."""
        steps = len(self.token_ids) - 1
        return steps / self.decode_s if steps > 0 and self.decode_s > 0 else None


@dataclass(frozen=True)
class TokenEvent:
    """One generated token.

    Attributes:
        index: position of its prompt among those submitted together.
        token_id: the token.
        text: text that became certain with it: empty inside a character or what may become a stop string.
        logprobs: the token's log-probabilities, where asked for.
        completion: the whole result, with the last token only.
    """

    index: int
    token_id: int
    text: str
    logprobs: TokenLogprobs | None
    completion: Completion | None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended, with the last token only."""
        return None if self.completion is None else self.completion.finish_reason
