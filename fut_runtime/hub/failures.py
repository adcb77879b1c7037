"""What the Hub's failures mean for whoever runs a command: one message each, with the remedy."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from fut_runtime.hub.secrets import redacted

#: Packages whose exceptions mean that the network failed; which of them huggingface_hub uses depends on its version.
_TRANSPORTS = ("requests", "httpx", "httpx2", "urllib3")
#: Of them, those where no connection came about, so that trying again at once is no use.
_UNREACHABLE = ("ConnectError", "ConnectTimeout", "ConnectionError", "ProxyError", "UnsupportedProtocol", "SSLError")
_LOGIN = "log in with `hf auth login` (formerly `huggingface-cli login`) or set HF_TOKEN"
_INCOMPLETE = "Consistency check failed"


@dataclass(frozen=True)
class Repository:
    """A repository on the Hub, as messages name it.

    Attributes:
        id: `owner/name`.
        revision: branch, tag or commit that was asked for.
        endpoint: address of the Hub; when None, HF_ENDPOINT or the public one.
        dataset: whether it is a data set; a model otherwise.
        local: whether the id stood where a local path might have.
        name: what messages begin with; the id when None.
    """

    id: str
    revision: str | None = None
    endpoint: str | None = None
    dataset: bool = False
    local: bool = True
    name: str | None = None

    @property
    def address(self) -> str:
        """Address of the Hub, for messages: without a password."""
        return redacted((self.endpoint or constants.ENDPOINT).rstrip("/"))

    @property
    def page(self) -> str:
        """Address of the repository's page."""
        return f"{self.address}/{'datasets/' if self.dataset else ''}{self.id}"

    @property
    def title(self) -> str:
        """What messages begin with."""
        return self.name or self.id

    @property
    def kind(self) -> str:
        """What it is called."""
        return "data set" if self.dataset else "model"


def explain(error: BaseException, repo: Repository, *, writing: bool = False) -> str | None:
    """What to tell the user about a failed request, or None for an error that is not the Hub's.

    Args:
        error: what huggingface_hub raised.
        repo: what was asked for.
        writing: whether something was to be uploaded.
    """
    if isinstance(error, LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        return (
            f"{repo.title}: HF_HUB_OFFLINE is set and revision {repo.revision or constants.DEFAULT_REVISION} is not in "
            "the cache; unset it once to download the model"
        )
    cause = root_cause(error)
    status = status_of(cause)
    if isinstance(cause, GatedRepoError):
        asked = "; if you have asked for access already, its owners have not granted it yet" if status == 403 else ""
        return f"{repo.title}: access is gated; accept its licence at {repo.page}, then {_LOGIN}{asked}"
    if isinstance(cause, RevisionNotFoundError):
        return f"{repo.title}: no revision {repo.revision!r}; see {repo.page}/tree for its branches and tags"
    if isinstance(cause, LocalTokenNotFoundError):
        return f"{repo.title}: the Hub wants to know who asks; {_LOGIN}"
    if isinstance(cause, RepositoryNotFoundError):
        return _not_found(repo, status, writing)
    if isinstance(cause, HFValidationError):
        either = "neither a local path nor a valid" if repo.local else "no valid"
        return f"{repo.title}: {either} Hub id (owner/name)"
    if status is not None:
        return f"{repo.title}: {_refusal(cause, status, repo, writing)}"
    return _network_failure(cause, repo, writing)


def root_cause(error: BaseException) -> BaseException:
    """The request that failed, behind what huggingface_hub made of it.

    It looks into its cache when a download fails, and complains of the cache; of uploads it says which file failed.
    """
    wraps = isinstance(error, LocalEntryNotFoundError) or type(error) is RuntimeError
    return root_cause(error.__cause__) if wraps and error.__cause__ is not None else error


def status_of(error: BaseException) -> int | None:
    """HTTP status of a failed request; None where there was no answer."""
    if not (isinstance(error, HfHubHTTPError) or _is_transport(error)):
        return None
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def is_network_error(error: BaseException) -> bool:
    """Whether the network failed, or the file system that the Hub's cache is in."""
    return isinstance(error, OSError) or _is_transport(error)


def was_cut_off(error: BaseException) -> bool:
    """Whether a connection that stood was lost, so that trying again may help."""
    if isinstance(error, OSError) and (_INCOMPLETE in str(error) or isinstance(error, ConnectionResetError)):
        return True
    # requests has one name for both.
    aborted = "Connection aborted" in str(error)
    return _is_transport(error) and (aborted or type(error).__name__ not in _UNREACHABLE)


def server_words(error: BaseException) -> str:
    """What the Hub itself says about a refusal, fit for a message; empty where it says nothing."""
    words = " ".join(str(getattr(error, "server_message", None) or "").split())
    return redacted("".join(c for c in words if c.isprintable()))[:200].rstrip(". ")


def _is_transport(error: BaseException) -> bool:
    return type(error).__module__.split(".")[0] in _TRANSPORTS


def _not_found(repo: Repository, status: int | None, writing: bool) -> str:
    if writing:
        return f"{repo.title}: no {repo.kind} at {repo.page} that this token may write to; {_token_hint(repo)}"
    either = "neither a local path nor a" if repo.local else "no"
    # Without the right to see it, a private repository is answered like one that does not exist.
    return (
        f"{repo.title}: {either} {repo.kind} at {repo.page} that this account may read; check the spelling, and if the "
        f"{repo.kind} is private {_LOGIN}"
    )


def _refusal(error: BaseException, status: int, repo: Repository, writing: bool) -> str:
    words = server_words(error)
    said = f" ({words})" if words else ""
    if status == 401:
        if get_token() is None:
            return f"the Hub wants to know who asks (HTTP 401){said}; {_LOGIN}"
        return f"the Hub does not accept the token{_token_origin()} (HTTP 401){said}; {_token_hint(repo)}"
    if status == 403 and writing:
        owner = repo.id.partition("/")[0]
        return (
            f"the token{_token_origin()} may not write to {repo.id} (HTTP 403){said}; {_token_hint(repo)}, and check "
            f"that the account may publish under {owner}"
        )
    if status == 403:
        return f"access denied (HTTP 403){said}; check that the token may read {repo.page}, or {_LOGIN}"
    if status == 429:
        wait = retry_after(error)
        when = "in a few minutes" if wait is None else f"in {wait} s"
        return f"{repo.address} limits the number of requests (HTTP 429){said}; run the same command again {when}"
    if status in (409, 412) and writing:
        return f"{repo.page} was changed by someone else meanwhile (HTTP {status}){said}; run the same command again"
    if status < 500 and words:
        return f"{repo.page} answered HTTP {status}: {words}"
    kept = "; what has arrived there is kept" if writing else ""
    return f"{repo.page} answered HTTP {status}{said}; try again later{kept}"


def retry_after(error: BaseException) -> int | None:
    """Seconds that the Hub asks to wait, from the header Retry-After; None where it does not say."""
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    value = str(headers.get("Retry-After", "")).strip()
    return int(value) if re.fullmatch(r"\d{1,9}", value) else None


def _network_failure(error: BaseException, repo: Repository, writing: bool) -> str | None:
    if was_cut_off(error):
        kept = "what has arrived is kept" if not writing else "files that have arrived whole are kept there"
        return f"{repo.title}: the connection to {repo.address} was cut again and again; run the same command, {kept}"
    if isinstance(error, OSError) and error.filename is not None and not _is_transport(error):
        where = "" if writing else "; HF_HOME says where the Hub's cache lies"
        return f"{repo.title}: {error.filename}: {error.strerror or error}{where}"
    if not is_network_error(error):
        return None
    if isinstance(error, OSError) and error.errno is not None and error.strerror and not _is_transport(error):
        detail = f" ({error.strerror})"
    else:
        detail = ""
    if writing:
        return f"{repo.title}: {repo.address} cannot be reached{detail}; check the network and HF_ENDPOINT"
    either = "no local path, and " if repo.local else ""
    return (
        f"{repo.title}: {either}{repo.address} cannot be reached{detail}; check the spelling, the network and "
        "HF_ENDPOINT, or set HF_HUB_OFFLINE=1 to use a copy that is in the cache"
    )


def _token_origin() -> str:
    return " of HF_TOKEN" if os.environ.get("HF_TOKEN") else ""


def _token_hint(repo: Repository) -> str:
    return f"make one with the right to it at {repo.address}/settings/tokens, then {_LOGIN}"
