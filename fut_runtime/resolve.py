"""Where an artifact lies: a local directory, or a snapshot of a repository on the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path

from fut_runtime.errors import ArtifactError

#: `owner/name` as the Hub allows it.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MANIFEST = "fut_config.json"
_SEAL = "fut_sealed.json"


def is_hub_id(text: str) -> bool:
    """Whether a text has the form of a repository's id, `owner/name`."""
    return _HUB_ID.fullmatch(text) is not None


def resolve_artifact(model: str | Path, revision: str | None = None) -> Path:
    """Directory of an artifact, downloaded first where `model` is a Hub id.

    The Hub's token, cache and offline mode are those of huggingface_hub (HF_TOKEN, HF_HOME, HF_HUB_OFFLINE).

    Raises:
        ArtifactError: there is no such directory or repository, or it holds no artifact; the message says what it
            holds instead and what to do. A local directory that was given a revision is refused, too.
    """
    text = str(model)
    if not text:
        raise ArtifactError("the name of the artifact is empty: give its directory, or a Hub id (owner/name)")
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            _check_directory(path)
            if revision is not None:
                raise ArtifactError(f"{path} is a local directory, which has no revision {revision!r}")
            return path
        if path.exists():
            raise ArtifactError(f"{path} is a file, expected the directory of an artifact{_convert_hint(path)}")
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}") from error
    if isinstance(model, Path) or not is_hub_id(text):
        raise ArtifactError(f"{text}: no such directory (a Hub id has the form owner/name)")
    return _download(text, revision)


def _check_directory(path: Path) -> None:
    if (path / _MANIFEST).is_file():
        return
    if (path / "config.json").is_file():
        raise ArtifactError(f"{path} is a checkpoint, not an artifact{_convert_hint(path)}")
    raise ArtifactError(f"{path} is not an artifact: it has no {_MANIFEST}")


def _convert_hint(path: Path | str) -> str:
    return f"; convert it first: fut-convert {path} OUT"


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"{repo} at revision {revision}" if revision else repo
    try:
        # The seal is small, and tells an artifact from a checkpoint of many gigabytes before those are fetched.
        hf_hub_download(repo, _SEAL, revision=revision)
        return Path(snapshot_download(repo, revision=revision))
    except LocalEntryNotFoundError as error:
        raise ArtifactError(
            f"{at}: there is no such directory, it is not in the Hub's cache, and the Hub cannot be reached "
            "(offline mode, or no connection)"
        ) from error
    except GatedRepoError as error:
        raise ArtifactError(
            f"{at}: access to this repository must be granted first; accept its terms on the Hub and set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ArtifactError(f"{at}: the repository has no such revision") from error
    except RepositoryNotFoundError as error:
        raise ArtifactError(
            f"{at}: neither a local directory nor a repository on the Hub that this token may read"
        ) from error
    except EntryNotFoundError as error:
        raise ArtifactError(f"{at}: the repository is not an artifact{_convert_hint(repo)}") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ArtifactError(f"{at}: the download failed ({type(error).__name__}: {error})") from error
