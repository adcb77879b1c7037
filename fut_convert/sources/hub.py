"""A model on the Hub: its revision pinned to a commit, only the files that are needed fetched into the Hub's cache.

The config comes first, so that a model that cannot be converted is refused before gigabytes are downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from fut_convert.errors import CheckpointError, HubError, UnsupportedModelError
from fut_convert.sources.config import model_spec
from fut_convert.sources.directory import DirectorySource, read_json_object
from fut_convert.sources.file_kinds import SAFETENSORS_INDEX, TORCH_INDEX, WEIGHT_ENTRIES, is_side_file, weight_entries

DEFAULT_REVISION = "main"

#: Packages whose exceptions mean that the network failed; which of them huggingface_hub uses depends on its version.
_TRANSPORTS = ("requests", "httpx", "httpx2", "urllib3")

_Result = TypeVar("_Result")


def open_hub_model(
    model: str,
    revision: str | None = None,
    token: str | None = None,
    *,
    endpoint: str | None = None,
    cache_dir: Path | None = None,
) -> DirectorySource:
    """Fetch what the conversion needs of a model, or find it in the cache when HF_HUB_OFFLINE is set.

    Args:
        model: Hub id, `owner/name`.
        revision: branch, tag or commit; the default branch when None. Recorded together with the commit it is.
        token: access token; when None, that of the environment or of the Hub's login.
        endpoint: address of the Hub; when None, HF_ENDPOINT or the public one.
        cache_dir: the Hub's cache; when None, its usual place.

    Raises:
        HubError: unknown model or revision, no access, no network, or not in the cache when offline.
        UnsupportedModelError, CheckpointError: as for a directory.
    """
    requested = revision or DEFAULT_REVISION
    fetch = _Fetch(model, requested, token, endpoint, cache_dir)
    config_path = fetch.file("config.json", requested)
    snapshot = config_path.parent
    commit = snapshot.name
    model_spec(read_json_object(config_path, f"{model}: config.json"), None, model)
    if not constants.HF_HUB_OFFLINE:
        fetch.snapshot(fetch.needed_files(commit), commit)
    identity = {"kind": "hub", "id": model, "revision": requested, "commit": commit}
    return DirectorySource(snapshot, identity)


class _Fetch:
    """Calls to the Hub for one model, their failures turned into HubErrors."""

    def __init__(
        self, model: str, revision: str, token: str | None, endpoint: str | None, cache_dir: Path | None
    ) -> None:
        self._model = model
        self._revision = revision
        self._token = token
        self._endpoint = endpoint
        self._cache_dir = cache_dir

    def file(self, name: str, revision: str) -> Path:
        """Path of one file in the cache, fetched if need be; its folder is named after the commit."""
        try:
            path = self._call(
                lambda: hf_hub_download(
                    self._model,
                    name,
                    revision=revision,
                    token=self._token,
                    endpoint=self._endpoint,
                    cache_dir=self._cache_dir,
                    local_files_only=constants.HF_HUB_OFFLINE,
                )
            )
        except EntryNotFoundError as error:
            raise self._no_config(name, revision) from error
        return Path(path)

    def needed_files(self, commit: str) -> list[str]:
        """Names of the weights and side files: of several formats of the weights, only the one that is read."""
        listing = self._listing(commit)
        entry = next(iter(weight_entries(listing)), None)
        if entry is None:
            raise CheckpointError(f"{self._model}: no weights; expected one of {', '.join(WEIGHT_ENTRIES)}")
        weights = {entry}
        if entry in (SAFETENSORS_INDEX, TORCH_INDEX):
            index = read_json_object(self.file(entry, commit), f"{self._model}: {entry}")
            weights.update(str(name) for name in dict(index.get("weight_map") or {}).values())
            absent = sorted(weights - listing)
            if absent:
                raise CheckpointError(f"{self._model}: {entry} names {absent[0]}, which the repository does not have")
        return sorted(weights | {name for name in listing if is_side_file(name)})

    def snapshot(self, names: Iterable[str], commit: str) -> None:
        """Fetch these files of a commit, several at a time."""
        self._call(
            lambda: snapshot_download(
                self._model,
                revision=commit,
                allow_patterns=[_literal_pattern(name) for name in names],
                token=self._token,
                endpoint=self._endpoint,
                cache_dir=self._cache_dir,
            )
        )

    def _listing(self, commit: str) -> set[str]:
        api = HfApi(endpoint=self._endpoint, token=self._token)
        info = self._call(lambda: api.model_info(self._model, revision=commit))
        return {sibling.rfilename for sibling in info.siblings or []}

    def _no_config(self, name: str, revision: str) -> Exception:
        listing = self._listing(revision)
        if any(file.endswith(".gguf") for file in listing):
            return UnsupportedModelError(
                f"{self._model}: holds GGUF files and no {name}; download one of them and give its path"
            )
        if "adapter_config.json" in listing:
            return UnsupportedModelError(
                f"{self._model}: holds a LoRA adapter, not a whole model; merge it into its base model first"
            )
        return CheckpointError(f"{self._model}: has no {name} at revision {revision}, so no model to convert")

    def _call(self, request: Callable[[], _Result]) -> _Result:
        try:
            return request()
        except LocalEntryNotFoundError as error:
            raise HubError(self._not_cached(error)) from error
        except EntryNotFoundError:
            raise
        except Exception as error:
            message = self._explain(error)
            if message is None:
                raise
            raise HubError(message) from error

    def _not_cached(self, error: LocalEntryNotFoundError) -> str:
        """The Hub's client looks into its cache when a request fails, and complains of the cache in the end."""
        if constants.HF_HUB_OFFLINE:
            return (
                f"{self._model}: HF_HUB_OFFLINE is set and revision {self._revision} is not in the cache; "
                "unset it once to download the model"
            )
        cause = error.__cause__
        return (self._explain(cause) if isinstance(cause, Exception) else None) or self._unreachable()

    def _unreachable(self) -> str:
        return (
            f"{self._model}: no local path, and {self._endpoint or constants.ENDPOINT} cannot be reached; check the "
            "spelling, the network and HF_ENDPOINT, or set HF_HUB_OFFLINE=1 to use a copy that is in the cache"
        )

    def _explain(self, error: Exception) -> str | None:
        """What to tell the user, or None for an error that is not the Hub's."""
        page = f"{self._endpoint or constants.ENDPOINT}/{self._model}"
        login = "log in with `hf auth login` (formerly `huggingface-cli login`) or set HF_TOKEN"
        if isinstance(error, GatedRepoError):
            return f"{self._model}: access is gated; accept its licence at {page}, then {login}"
        if isinstance(error, RevisionNotFoundError):
            return f"{self._model}: no revision {self._revision!r}; see {page}/tree for its branches and tags"
        if isinstance(error, RepositoryNotFoundError):
            return (
                f"{self._model}: neither a local path nor a model at {page} that this account may read; "
                f"check the spelling, and if the model is private {login}"
            )
        if isinstance(error, HFValidationError):
            return f"{self._model}: neither a local path nor a valid Hub id (owner/name)"
        if isinstance(error, HfHubHTTPError) and getattr(error, "response", None) is not None:
            status = error.response.status_code
            if status in (401, 403):
                return f"{self._model}: access denied (HTTP {status}); check that the token may read {page}, or {login}"
            return f"{self._model}: {page} answered HTTP {status}; try again later"
        if is_network_error(error):
            return self._unreachable()
        return None


def is_network_error(error: Exception) -> bool:
    """Whether the network failed, or the file system that the Hub's cache is in."""
    return isinstance(error, OSError) or type(error).__module__.split(".")[0] in _TRANSPORTS


def _literal_pattern(name: str) -> str:
    """A pattern that matches this name only."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
