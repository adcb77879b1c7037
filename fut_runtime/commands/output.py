"""What `generate` and `chat` print: text as it comes, JSON, log-probabilities, and a line of timings."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from fut_runtime.results import Completion
    from fut_runtime.tokenizer import Tokenizer

#: Control characters other than tab and newline. A model's output must not steer the reader's terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def write_text(text: str) -> None:
    """Write model output to standard output at once; on a terminal, control characters as U+FFFD."""
    if not text:
        return
    stream = sys.stdout
    if stream.isatty():
        text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()


def completion_json(
    completion: Completion, prompt: object, tokenizer: Tokenizer | None, *, interrupted: bool = False
) -> dict[str, Any]:
    """A completion as an object for programs."""
    result: dict[str, Any] = {
        "index": completion.index,
        "prompt": prompt,
        "text": completion.text,
        "finish_reason": "interrupted" if interrupted else completion.finish_reason,
        "stop": completion.stop,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": len(completion.token_ids),
        "token_ids": list(completion.token_ids),
        "time_to_first_token_s": _rounded(completion.time_to_first_token_s),
        "decode_tokens_per_s": _rounded(completion.decode_tokens_per_s),
    }
    if completion.logprobs is not None:
        result["logprobs"] = [
            {
                "token_id": token,
                "token": _piece(tokenizer, token),
                "logprob": entry.logprob,
                "top": [{"token_id": i, "token": _piece(tokenizer, i), "logprob": v} for i, v in entry.top],
            }
            for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
    return result


def logprob_lines(completion: Completion, tokenizer: Tokenizer | None) -> list[str]:
    """A line a token: its log-probability, and the alternatives."""
    lines = []
    for token, entry in zip(completion.token_ids, completion.logprobs or (), strict=False):
        others = "  ".join(f"{_piece(tokenizer, i)!r} {value:.3f}" for i, value in entry.top)
        lines.append(f"{entry.logprob:9.3f}  {_piece(tokenizer, token)!r:<20} {others}".rstrip())
    return lines


def summary(completions: Sequence[Completion], seconds: float, reason: str | None = None) -> str:
    """One line of counts and timings: of one completion, or of a batch together."""
    tokens = sum(len(c.token_ids) for c in completions)
    prompt_tokens = sum(c.prompt_tokens - c.cached_tokens for c in completions)
    first = [c.time_to_first_token_s for c in completions if c.time_to_first_token_s is not None]
    parts = [f"{prompt_tokens} prompt tokens"]
    if len(completions) > 1:
        parts.insert(0, f"{len(completions)} prompts")
    if first:
        parts.append(f"first token after {min(first):.2f} s")
    parts.append(f"{tokens} tokens in {seconds:.2f} s")
    if len(completions) == 1:
        rate = completions[0].decode_tokens_per_s
        reason = reason or completions[0].finish_reason
    else:
        rate = tokens / seconds if seconds > 0 else None
    if rate is not None:
        parts.append(f"{rate:.1f} tokens/s")
    if reason:
        parts.append(f"ended by {reason}")
    return ", ".join(parts)


def note(text: str) -> None:
    """A remark for the reader, on standard error."""
    click.echo(click.style(text, dim=True), err=True)


def _piece(tokenizer: Tokenizer | None, token: int) -> str | None:
    return None if tokenizer is None else tokenizer.piece(token)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
