"""Keeping access tokens and passwords out of messages and logs, whoever put them there."""

from __future__ import annotations

import logging
import re

from huggingface_hub import get_token

_TOKEN = re.compile(r"\bhf_\w+")
#: Name and password in an address, as in https://name:password@host.
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]*@")
#: The library that asks the Hub, and logs the addresses of requests that it makes again.
_LIBRARY = "huggingface_hub"


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


def redact_logs() -> None:
    """Take them out of what huggingface_hub logs from now on; its loggers appear as its modules are loaded."""
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] == _LIBRARY:
            # The same filter is added once.
            logging.getLogger(name).addFilter(_redact_record)


def _redact_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = redacted(record.getMessage()), None
    return True
