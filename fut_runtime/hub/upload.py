"""Publishes an artifact on the Hub: large files first, then one commit that makes all of them appear together.

What makes it resumable is that the Hub keeps large files by their hash: those that have arrived whole are not sent
again, and nobody sees any of them before the commit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

from fut_runtime.artifact.paths import MANIFEST_FILE, is_shard_name
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.verify import verify_artifact
from fut_runtime.errors import ArtifactError, HubError
from fut_runtime.hub.contents import UploadContents, UploadFile, upload_contents
from fut_runtime.hub.failures import Repository, root_cause
from fut_runtime.hub.requests import ask_hub
from fut_runtime.resolve import is_hub_id

#: Large files sent at once.
_THREADS = 4
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack")


@dataclass(frozen=True)
class Published:
    """An artifact on the Hub.

    Attributes:
        repo: `owner/name`.
        url: address of its page.
        revision: branch.
        commit: the commit that holds it.
        changed: whether the commit is new; false where the branch held exactly this already.
        files: how many files it has.
        bytes: their size.
        notes: what the card could not say, see `Card`.
    """

    repo: str
    url: str
    revision: str
    commit: str
    changed: bool
    files: int
    bytes: int
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self) | {"notes": list(self.notes)}


def check_upload(
    repo: str, *, private: bool = False, revision: str | None = None, token: str | None = None,
    endpoint: str | None = None,
) -> None:  # fmt: skip
    """Check that a repository may be written to, or created, before the work of making what goes into it.

    Raises:
        HubError: no token, one that may not write, not the account's name or an organisation of its, a repository that
            is public where `private` is wanted, or the Hub out of reach.
        ArtifactError: the repository holds another model.
    """
    _Upload(repo, private, revision, token, endpoint).check()


def upload_artifact(
    path: str | Path,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    card: bool = True,
    base_model: str | None = None,
    license: str | None = None,
    bench: Path | None = None,
    verify: bool = True,
    token: str | None = None,
    endpoint: str | None = None,
    progress: Callable[[int], None] | None = None,
    on_verified: Callable[[], None] | None = None,
) -> Published:
    """Upload an artifact in one commit.

    Interrupted, or failed, it leaves nothing that anyone would see, and the same call goes on with the large files that
    have not arrived. Files that an earlier artifact left there as shards are removed by the same commit.

    Args:
        path: the artifact's directory.
        repo: Hub id, created where there is none.
        private: create it as a private repository; an existing one must be private.
        revision: branch, created from the default one where there is none; the default one when None.
        message: of the commit.
        card, base_model, license, bench: see `upload_contents`.
        verify: read and check the whole artifact first. What is sent is compared with the sealed hashes in any case.
        token: access token; when None, that of the environment or of the Hub's login.
        endpoint: address of the Hub; when None, HF_ENDPOINT or the public one.
        progress: told the bytes that each step of the verification has read.
        on_verified: called before the first file is sent.

    Raises:
        ArtifactError: it is not sealed, damaged, or holds what must not be published; or the repository holds another
            model.
        HubError: the Hub does not take it; the message says why and what to do.
    """
    artifact = Artifact.open(path)
    upload = _Upload(repo, private, revision, token, endpoint)
    contents = upload_contents(artifact, repo, card=card, base_model=base_model, license=license, bench=bench)
    upload.check()
    if verify:
        report = verify_artifact(artifact.path, progress)
        if not report.ok:
            raise ArtifactError(f"{report.findings[0].message} ({len(report.findings)} findings; not uploaded)")
    if on_verified is not None:
        on_verified()
    return upload.run(contents, message or f"Upload {artifact.path.name}, packed by FuTransformer")


class _Upload:
    """Requests for one upload."""

    def __init__(self, repo: str, private: bool, revision: str | None, token: str | None, endpoint: str | None) -> None:
        if not is_hub_id(repo):
            raise HubError(f"{repo}: no valid Hub id (owner/name)")
        if constants.HF_HUB_OFFLINE:
            raise HubError(f"{repo}: HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it")
        self._repo = Repository(repo, revision, endpoint, local=False)
        self._private = private
        self._branch = revision or constants.DEFAULT_REVISION
        self._token = token
        self._api = HfApi(endpoint=endpoint, token=token)

    def check(self) -> None:
        """See `check_upload`."""
        if self._token is None and get_token() is None:
            raise HubError(
                f"{self._repo.id}: publishing needs an access token; make one with the right to write at "
                f"{self._repo.address}/settings/tokens, then log in with `hf auth login` or set HF_TOKEN"
            )
        account = ask_hub(self._api.whoami, self._repo, writing=True)
        access = (account.get("auth") or {}).get("accessToken") or {}
        if access.get("role") == "read":
            raise HubError(
                f"{self._repo.id}: the token may only read; make one with the right to write at "
                f"{self._repo.address}/settings/tokens, then log in with `hf auth login` or set HF_TOKEN"
            )
        owners = [account.get("name"), *(organisation.get("name") for organisation in account.get("orgs") or [])]
        owner = self._repo.id.partition("/")[0]
        # Fine-grained tokens do not tell all organisations they are for.
        if access.get("role") != "fineGrained" and owner.lower() not in [str(name).lower() for name in owners]:
            raise HubError(
                f"{self._repo.id}: the account may not publish under {owner!r}; it may under "
                f"{', '.join(str(name) for name in owners)}"
            )
        info = self._info(None)
        if info is not None:
            self._check_visibility(info)
            # A branch that does not exist yet begins as a copy of the default one.
            self._check_not_another_model(self._info(self._branch) or info)

    def _info(self, revision: str | None) -> Any:
        """The repository at a branch, or None where the Hub has no such repository or branch for this token."""
        try:
            return self._ask(lambda: self._api.model_info(self._repo.id, revision=revision))
        except HubError as error:
            absent = (RepositoryNotFoundError, RevisionNotFoundError)
            if error.__cause__ is None or not isinstance(root_cause(error.__cause__), absent):
                raise
            return None

    def run(self, contents: UploadContents, message: str) -> Published:
        """Create the repository and branch where needed, send the files, commit, and look at the result."""
        self._ask(lambda: self._api.create_repo(self._repo.id, private=self._private or None, exist_ok=True))
        if self._branch != constants.DEFAULT_REVISION and not self._branch.startswith("refs/"):
            self._ask(lambda: self._api.create_branch(self._repo.id, branch=self._branch, exist_ok=True))
        before = self._ask(lambda: self._api.model_info(self._repo.id, revision=self._branch))
        self._check_visibility(before)
        self._check_not_another_model(before)
        present = {sibling.rfilename for sibling in before.siblings or []}
        additions = [_addition(file) for file in contents.files]
        self._ask(
            lambda: self._api.preupload_lfs_files(
                self._repo.id, additions, revision=self._branch, num_threads=_THREADS, free_memory=False
            )
        )
        for file, addition in zip(contents.files, additions, strict=True):
            if file.sha256 is not None and addition.upload_info.sha256.hex() != file.sha256:
                raise ArtifactError(
                    f"{file.name}: SHA-256 is {addition.upload_info.sha256.hex()}, expected {file.sha256}; the file "
                    "is damaged and nothing was published: see fut-artifact verify"
                )
        stale = sorted(name for name in present - {file.name for file in contents.files} if is_shard_name(name))
        commit = self._ask(
            lambda: self._api.create_commit(
                self._repo.id,
                [*additions, *(CommitOperationDelete(name) for name in stale)],
                commit_message=message,
                revision=self._branch,
                num_threads=_THREADS,
            )
        )
        self._check_published(contents, commit.oid)
        return Published(
            repo=self._repo.id, url=self._repo.page, revision=self._branch, commit=commit.oid,
            changed=commit.oid != before.sha, files=len(contents.files), bytes=contents.nbytes, notes=contents.notes,
        )  # fmt: skip

    def _ask(self, request: Callable[[], Any]) -> Any:
        return ask_hub(request, self._repo, writing=True)

    def _check_visibility(self, info: Any) -> None:
        if self._private and info.private is False:
            raise HubError(
                f"{self._repo.id}: exists and is public, and --private only creates; make it private at "
                f"{self._repo.page}/settings, or leave the option out"
            )

    def _check_not_another_model(self, info: Any) -> None:
        present = {sibling.rfilename for sibling in info.siblings or []}
        weights = sorted(name for name in present if name.endswith(_WEIGHTS))
        if weights and MANIFEST_FILE not in present:
            raise ArtifactError(
                f"{self._repo.id}: branch {self._branch} holds another model ({weights[0]}), whose files would be "
                "mixed with the artifact's; choose another repository or another --revision"
            )

    def _check_published(self, contents: UploadContents, commit: str) -> None:
        """Compare what the Hub lists with what was sent: a `.gitignore` there, for one, drops files silently."""
        info = self._ask(lambda: self._api.model_info(self._repo.id, revision=commit, files_metadata=True))
        found = {sibling.rfilename: sibling for sibling in info.siblings or []}
        for file in contents.files:
            there = found.get(file.name)
            stored = None if there is None or there.lfs is None else there.lfs["sha256"]
            wrong = there is not None and (there.size != file.size or stored not in (None, file.sha256))
            if there is None or (wrong and file.sha256 is not None):
                reason = "is missing there" if there is None else f"has {there.size} bytes there, {file.size} were sent"
                raise HubError(
                    f"{self._repo.id}: {file.name} {reason}, at commit {commit[:12]}; look at {self._repo.page}/tree/"
                    f"{self._branch} (a .gitignore there may leave it out), and upload again"
                )


def _addition(file: UploadFile) -> CommitOperationAdd:
    source = file.source if isinstance(file.source, bytes) else str(file.source)
    return CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=source)
