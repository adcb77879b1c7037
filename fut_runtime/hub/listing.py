"""Which files a repository on the Hub holds, as far as what it answers can be believed."""

from __future__ import annotations

from dataclasses import dataclass

from huggingface_hub import HfApi

from fut_runtime.artifact.json_text import excerpt
from fut_runtime.artifact.paths import check_relative_name
from fut_runtime.errors import ArtifactError
from fut_runtime.hub.failures import Repository
from fut_runtime.hub.requests import ask_hub


@dataclass(frozen=True)
class HubFile:
    """A file as the Hub lists it.

    Attributes:
        name: within the repository.
        size: in bytes; 0 where it was not asked for.
        oid: SHA-256, or git's SHA-1, of its content; empty where it was not asked for.
    """

    name: str
    size: int = 0
    oid: str = ""


def listed_files(repo: Repository, revision: str, token: str | None, *, sizes: bool = False) -> dict[str, HubFile]:
    """The files of a model's repository at a commit, by name; names that lead out of it are left out.

    Args:
        sizes: ask for sizes and hashes too.

    Raises:
        HubError: the Hub does not say.
    """

    def request() -> dict[str, HubFile]:
        api = HfApi(endpoint=repo.endpoint, token=token)
        info = api.model_info(repo.id, revision=revision, files_metadata=sizes)
        files = [_listed(file, sizes) for file in info.siblings or []]
        return {file.name: file for file in files if _is_safe(file.name)}

    return ask_hub(request, repo)


def _listed(file: object, sizes: bool) -> HubFile:
    name = getattr(file, "rfilename", None)
    if not isinstance(name, str):
        raise ValueError(f"a file is named {excerpt(name)}")
    if not sizes:
        return HubFile(name)
    size, large = getattr(file, "size", None), getattr(file, "lfs", None)
    oid = large["sha256"] if large else getattr(file, "blob_id", None)
    if size is not None and (type(size) is not int or size < 0):
        raise ValueError(f"{excerpt(name)} has {excerpt(size)} bytes")
    return HubFile(name, size or 0, str(oid))


def _is_safe(name: str) -> bool:
    try:
        check_relative_name(name, "")
    except ArtifactError:
        return False
    return True
