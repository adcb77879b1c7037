"""Keeping access tokens and passwords out of messages, whoever put them there."""

from __future__ import annotations

import re

from huggingface_hub import get_token

_TOKEN = re.compile(r"\bhf_\w+")
#: Name and password in an address, as in https://name:password@host.
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]*@")


def redacted(text: str) -> str:
    """A text without the tokens and passwords in it: those of the Hub's form, and the one in use whatever its form."""
    token = get_token()
    if token:
        text = text.replace(token, "…")
    return _CREDENTIALS.sub("", _TOKEN.sub("hf_…", text))


def redact_chain(error: BaseException) -> None:
    """Take them out of the texts of an error and of those that led to it, which a traceback would show."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.args = tuple(redacted(part) if isinstance(part, str) else part for part in one.args)
        waiting += [one.__cause__, one.__context__]
