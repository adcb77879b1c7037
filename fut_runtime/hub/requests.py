"""Requests to the Hub that wait and try again where it asks for that, and fail with a message where it is no use."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from fut_runtime.artifact.json_text import excerpt
from fut_runtime.errors import HubError
from fut_runtime.hub.failures import Repository, explain, retry_after, root_cause, status_of, was_cut_off
from fut_runtime.hub.secrets import redact_chain, redact_logs, redacted

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)

#: Statuses that say: not now.
_PASSING = (408, 429, 500, 502, 503, 504)
#: What huggingface_hub raises for an answer that is not what the Hub answers.
_MISUNDERSTOOD = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)
#: Requests in all; huggingface_hub tries some of them several times itself.
_ATTEMPTS = 4
#: Longer than this nobody is left waiting without having been asked.
_LONGEST_WAIT_S = 300


def ask_hub(request: Callable[[], _Result], repo: Repository, *, writing: bool = False) -> _Result:
    """Make a request, waiting as long as the Hub asks (HTTP 429, Retry-After), or longer and longer where it fails.

    Args:
        request: calls huggingface_hub; may be called several times.
        repo: what is asked for, for messages.
        writing: whether something is uploaded.

    Raises:
        HubError: it failed; the message says why and what to do.
        EntryNotFoundError: the repository has no such file to read.
    """
    for attempt in range(_ATTEMPTS):
        redact_logs()
        try:
            return request()
        except Exception as error:
            missing = isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError)
            if missing and not writing:
                raise
            wait = _wait(root_cause(error), attempt)
            if wait is None:
                raise _failed(error, repo, writing) from error
            _log.warning("%s: waiting %d s for the Hub, then trying again", repo.title, wait)
            time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def _wait(cause: BaseException, attempt: int) -> int | None:
    """Seconds until trying again; None where that is no use."""
    if attempt + 1 == _ATTEMPTS or not (status_of(cause) in _PASSING or was_cut_off(cause)):
        return None
    asked = retry_after(cause)
    wait = 2**attempt if asked is None else asked
    return wait if wait <= _LONGEST_WAIT_S else None


def _failed(error: Exception, repo: Repository, writing: bool) -> Exception:
    redact_chain(error)
    message = explain(error, repo, writing=writing)
    if message is not None:
        return HubError(message)
    if writing and isinstance(error, (RuntimeError, ValueError)):
        # Of the storage behind the Hub, or of its answer: types of its own it does not have.
        first = redacted((str(error).splitlines() or [""])[0])[:200]
        return HubError(
            f"{repo.title}: the upload failed ({type(error).__name__}: {first}); run the same command again"
        )
    if not writing and isinstance(error, _MISUNDERSTOOD):
        return HubError(
            f"{repo.title}: what {repo.address} answered cannot be understood ({type(error).__name__}: "
            f"{excerpt(redacted(str(error)))}); check HF_ENDPOINT, or try again later"
        )
    return error
