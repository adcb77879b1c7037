"""A model on the Hub: its revision pinned to a commit, only the files that are needed fetched into the Hub's cache.

The config comes first, so that a model that cannot be converted is refused before gigabytes are downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError

import fut_runtime.errors
from fut_convert.errors import CheckpointError, HubError, PartsError, UnsupportedModelError
from fut_convert.sources.base import Source
from fut_convert.sources.config import model_spec
from fut_convert.sources.directory import DirectorySource, read_json_object, weight_map
from fut_convert.sources.file_kinds import (
    SAFETENSORS_INDEX,
    TORCH_INDEX,
    TORCH_SINGLE,
    WEIGHT_ENTRIES,
    is_side_file,
    weight_entries,
)
from fut_convert.sources.hub_file import HubFiles
from fut_convert.sources.hub_stream import StreamedSource
from fut_convert.sources.quantized_formats import plain_config, stored_format
from fut_runtime.hub.cached_files import damaged_files, remove_files
from fut_runtime.hub.download import literal_pattern
from fut_runtime.hub.failures import Repository
from fut_runtime.hub.listing import HubFile, listed_files
from fut_runtime.hub.requests import ask_hub

DEFAULT_REVISION = "main"

_Result = TypeVar("_Result")


def open_hub_model(
    model: str,
    revision: str | None = None,
    token: str | None = None,
    *,
    endpoint: str | None = None,
    cache_dir: Path | None = None,
    stream: bool = False,
    fetch: bool = True,
    before_fetching: Callable[[Source], None] | None = None,
) -> DirectorySource:
    """Fetch what the conversion needs of a model, or find it in the cache when HF_HUB_OFFLINE is set.

    Args:
        model: Hub id, `owner/name`.
        revision: branch, tag or commit; the default branch when None. Recorded together with the commit it is.
        token: access token; when None, that of the environment or of the Hub's login.
        endpoint: address of the Hub; when None, HF_ENDPOINT or the public one.
        cache_dir: the Hub's cache; when None, its usual place.
        stream: leave weights that are not in the cache on the Hub, to be fetched while they are converted.
        fetch: false leaves them there although they are not to be streamed: enough for a plan, which reads headers.
        before_fetching: called with such a source before weights are fetched; where it raises, none is.

        Weights that cannot be read in parts are fetched in any case: pickles, and those of a Hub that gives whole
        files only.

    Raises:
        HubError: unknown model or revision, no access, no network, or not in the cache when offline.
        UnsupportedModelError, CheckpointError: as for a directory.
    """
    requested = revision or DEFAULT_REVISION
    if stream and constants.HF_HUB_OFFLINE:
        raise HubError(f"{model}: --stream fetches the weights from the Hub, which HF_HUB_OFFLINE forbids")
    hub = _Fetch(model, requested, token, endpoint, cache_dir)
    config_path = hub.file("config.json", requested)
    snapshot = config_path.parent
    commit = snapshot.name
    config = read_json_object(config_path, f"{model}: config.json")
    model_spec(plain_config(config), None, model)
    identity = {"kind": "hub", "id": model, "revision": requested, "commit": commit}
    if not constants.HF_HUB_OFFLINE:
        needed = hub.needed_files(commit)

        def read_file(name: str) -> dict[str, Any] | None:
            return read_json_object(hub.file(name, commit), f"{model}: {name}") if name in needed else None

        stored_format(config, read_file, model)
        pickled = any(name in (TORCH_SINGLE, TORCH_INDEX) for name in needed)
        absent = [name for name in needed if name.endswith(".safetensors") and not (snapshot / name).exists()]
        if stream and pickled:
            raise UnsupportedModelError(
                f"{model}: has its weights as pickles, which cannot be read in parts; convert it without --stream"
            )
        if stream:
            return _open_remote(hub, needed, absent, snapshot, identity, streaming=True)
        if absent and not pickled and (before_fetching is not None or not fetch):
            with suppress(PartsError):
                source = _open_remote(hub, needed, absent, snapshot, identity, streaming=False)
                if not fetch:
                    return source
                with source:
                    if before_fetching is not None:
                        before_fetching(source)
        hub.snapshot(needed, snapshot)
    return DirectorySource(snapshot, identity)


def _open_remote(
    hub: _Fetch, needed: Sequence[str], absent: Sequence[str], snapshot: Path, identity: dict[str, Any], *,
    streaming: bool,
) -> StreamedSource:  # fmt: skip
    """Fetch all but the absent weights, and leave those on the Hub."""
    hub.snapshot([name for name in needed if name not in absent], snapshot)
    listed = hub.listed(snapshot.name)
    files = {name: listed[name] for name in absent}
    return StreamedSource(snapshot, identity, hub.files(snapshot.name), files, streaming=streaming)


class _Fetch:
    """Calls to the Hub for one model, their failures turned into HubErrors."""

    def __init__(
        self, model: str, revision: str, token: str | None, endpoint: str | None, cache_dir: Path | None
    ) -> None:
        self._model = model
        self._repo = Repository(model, revision, endpoint)
        self._token = token
        self._endpoint = endpoint
        self._cache_dir = cache_dir

    def file(self, name: str, revision: str) -> Path:
        """Path of one file in the cache, fetched if need be; its folder is named after the commit."""

        def fetch() -> list[Path]:
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
            return [Path(path)]

        try:
            return self._whole(fetch)[0]
        except EntryNotFoundError as error:
            raise self._no_config(name, revision) from error

    def needed_files(self, commit: str) -> list[str]:
        """Names of the weights and side files: of several formats of the weights, only the one that is read."""
        listing = self._listing(commit)
        entry = next(iter(weight_entries(listing)), None)
        if entry is None:
            raise CheckpointError(f"{self._model}: no weights; expected one of {', '.join(WEIGHT_ENTRIES)}")
        weights = {entry}
        if entry in (SAFETENSORS_INDEX, TORCH_INDEX):
            index = read_json_object(self.file(entry, commit), f"{self._model}: {entry}")
            weights.update(weight_map(index, f"{self._model}: {entry}").values())
            absent = sorted(weights - listing)
            if absent:
                raise CheckpointError(f"{self._model}: {entry} names {absent[0]}, which the repository does not have")
        return sorted(weights | {name for name in listing if is_side_file(name)})

    def snapshot(self, names: Sequence[str], folder: Path) -> None:
        """Fetch these files of a commit, whose folder in the cache is given, several at a time."""
        absent = [folder / name for name in names if not (folder / name).exists()]

        def fetch() -> list[Path]:
            self._call(
                lambda: snapshot_download(
                    self._model,
                    revision=folder.name,
                    allow_patterns=[literal_pattern(name) for name in names],
                    token=self._token,
                    endpoint=self._endpoint,
                    cache_dir=self._cache_dir,
                )
            )
            return absent

        self._whole(fetch)

    def files(self, commit: str) -> HubFiles:
        """Reads the files of a commit in parts."""
        return HubFiles(self._model, commit, self._token, self._endpoint, self._call)

    def listed(self, commit: str) -> dict[str, HubFile]:
        """The files of a commit, with their sizes and hashes, by name."""
        return _as_hub_errors(lambda: listed_files(self._repo, commit, self._token, sizes=True))

    def _whole(self, fetch: Callable[[], list[Path]]) -> list[Path]:
        """Fetch files, and those a second time that were damaged on the way."""
        for _ in range(2):
            paths = fetch()
            damaged = damaged_files(paths)
            if not damaged:
                return paths
            if not constants.HF_HUB_OFFLINE:
                remove_files(damaged)
        raise CheckpointError(
            f"{self._model}: {damaged[0].name} does not have the hash that the Hub gives for it, even when fetched "
            "again; check the disk and the network, or ask its owner to upload it again"
        )

    def _listing(self, commit: str) -> set[str]:
        return set(_as_hub_errors(lambda: listed_files(self._repo, commit, self._token)))

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
        return _as_hub_errors(lambda: ask_hub(request, self._repo))


def _as_hub_errors(request: Callable[[], _Result]) -> _Result:
    """Make this package's HubError of the runtime's."""
    try:
        return request()
    except HubError:
        raise
    except fut_runtime.errors.HubError as error:
        raise HubError(str(error)) from error
