"""Fetches an artifact into the Hub's cache: pinned to a commit, hashed once, its seal last.

The seal is the last file to arrive, as it is the last to be written: a cache that has it holds files that were compared
with their hashes, and one that lacks it, after a download that was interrupted, is not taken for whole by anyone.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError

from fut_runtime.artifact.hashing import hash_file
from fut_runtime.artifact.paths import (
    CARD_FILE,
    FILES_FILE,
    MARKER_FILE,
    REPORT_DATA_FILE,
    REPORT_FILE,
    inside,
)
from fut_runtime.artifact.seal import read_files, read_marker
from fut_runtime.errors import ArtifactError, HubError
from fut_runtime.hub.cached_files import remove_files
from fut_runtime.hub.failures import Repository
from fut_runtime.hub.listing import listed_files
from fut_runtime.hub.requests import ask_hub

#: Files outside the sealed set that commands show.
_BESIDE = (CARD_FILE, REPORT_FILE, REPORT_DATA_FILE)


def fetch_artifact(
    repo_id: str,
    revision: str | None = None,
    *,
    token: str | None = None,
    endpoint: str | None = None,
    cache_dir: Path | None = None,
) -> Path:
    """The snapshot of an artifact in the Hub's cache, fetched where it is not there yet.

    What an interrupted download left is used. Every sealed file is compared with its hash once, after it was fetched;
    a damaged one is fetched a second time.

    Args:
        repo_id: `owner/name`.
        revision: branch, tag or commit; the default branch when None.
        token: access token; when None, that of the environment or of the Hub's login.
        endpoint: address of the Hub; when None, HF_ENDPOINT or the public one.
        cache_dir: the Hub's cache; when None, its usual place.

    Raises:
        HubError: the Hub or the cache does not have it, or does not give it.
        ArtifactError: the repository holds no artifact, an incomplete one, or a damaged one.
    """
    download = _Download(repo_id, revision, token, endpoint, cache_dir)
    commit = download.file(FILES_FILE, revision).parent.name
    for last in (False, True):
        try:
            return download.whole(commit)
        except _DamagedError as damage:
            if last:
                raise ArtifactError(
                    f"{repo_id}: {damage}. It was fetched twice, so what the Hub has is damaged: ask its owner to "
                    "upload the artifact again"
                ) from damage
            damage.remove()
    raise AssertionError("the second attempt returns or raises")


class _DamagedError(Exception):
    """Files that came without an error, and are not what was sealed."""

    def __init__(self, message: str, paths: Iterable[Path]) -> None:
        super().__init__(message)
        self._paths = list(paths)

    def remove(self) -> None:
        """Take the files out of the cache."""
        remove_files(self._paths)


class _Download:
    """Requests for the files of one artifact."""

    def __init__(
        self, repo_id: str, revision: str | None, token: str | None, endpoint: str | None, cache_dir: Path | None
    ) -> None:
        self._repo = Repository(repo_id, revision, endpoint)
        self._token = token
        self._cache_dir = cache_dir

    def file(self, name: str, revision: str | None) -> Path:
        """Path of one file in the cache, whose folder is named after the commit."""
        try:
            path = ask_hub(
                lambda: hf_hub_download(
                    self._repo.id,
                    name,
                    revision=revision,
                    token=self._token,
                    endpoint=self._repo.endpoint,
                    cache_dir=self._cache_dir,
                    local_files_only=constants.HF_HUB_OFFLINE,
                ),
                self._repo,
            )
        except EntryNotFoundError as error:
            raise ArtifactError(
                f"{self._repo.id}: the repository is not an artifact (it has no {name}); convert it first: "
                f"fut-convert {self._repo.id} OUT"
            ) from error
        return Path(path)

    def whole(self, commit: str) -> Path:
        """The snapshot of a commit with every sealed file in it.

        Raises:
            _DamagedError: files that were fetched are not what was sealed.
        """
        snapshot = self.file(FILES_FILE, commit).parent
        names = self._sealed_names(snapshot)
        absent = [name for name in names if not inside(snapshot, name).is_file()]
        if (snapshot / MARKER_FILE).is_file() and not absent:
            return snapshot
        if constants.HF_HUB_OFFLINE:
            raise HubError(
                f"{self._repo.id}: HF_HUB_OFFLINE is set and the download of commit {commit[:12]} did not finish "
                f"({absent[0] if absent else MARKER_FILE} is not in the cache); unset it once to download the rest"
            )
        beside = self._check_listing(commit, names)
        ask_hub(
            lambda: snapshot_download(
                self._repo.id,
                revision=commit,
                allow_patterns=[literal_pattern(name) for name in (*names, *beside)],
                token=self._token,
                endpoint=self._repo.endpoint,
                cache_dir=self._cache_dir,
            ),
            self._repo,
        )
        self._check_hashes(snapshot)
        self.file(MARKER_FILE, commit)
        try:
            read_files(snapshot, read_marker(snapshot))
        except ArtifactError as error:
            raise _DamagedError(str(error), (snapshot / FILES_FILE, snapshot / MARKER_FILE)) from error
        return snapshot

    def _sealed_names(self, snapshot: Path) -> list[str]:
        try:
            return sorted(read_files(snapshot, None))
        except ArtifactError as error:
            raise _DamagedError(str(error), [snapshot / FILES_FILE]) from error

    def _check_listing(self, commit: str, names: Iterable[str]) -> list[str]:
        """Check that the repository has everything, before gigabytes are fetched; returns what else to fetch."""
        present = set(listed_files(self._repo, commit, self._token))
        absent = sorted({*names, MARKER_FILE} - present)
        if absent:
            raise ArtifactError(
                f"{self._repo.id}: the artifact is incomplete: the repository does not have {absent[0]}"
                f"{f' and {len(absent) - 1} more' if absent[1:] else ''}; ask its owner to upload it again"
            )
        return sorted(present.intersection(_BESIDE) - set(names))

    def _check_hashes(self, snapshot: Path) -> None:
        from fut_runtime.artifact.report import ByteProgress

        files = read_files(snapshot, None)
        damaged = []
        with ByteProgress("verifying", sum(file.size for file in files.values())) as progress:
            for name, expected in files.items():
                found = hash_file(inside(snapshot, name), progress.advance)
                if found.sha256 != expected.sha256:
                    damaged.append(name)
                    message = f"{name} came with SHA-256 {found.sha256}, sealed is {expected.sha256}"
        if damaged:
            raise _DamagedError(message, [snapshot / name for name in damaged])


def literal_pattern(name: str) -> str:
    """A pattern of huggingface_hub's that matches this name only."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
