"""Where an artifact lies: a local directory, or a snapshot of a repository on the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path

from fut_runtime.errors import ArtifactError

#: `owner/name` as the Hub allows it.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MANIFEST = "fut_config.json"


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
    # Imported here: it takes a while, and a local directory does not need it.
    from fut_runtime.hub.download import fetch_artifact

    return fetch_artifact(text, revision)


def _check_directory(path: Path) -> None:
    if (path / _MANIFEST).is_file():
        return
    if (path / "config.json").is_file():
        raise ArtifactError(f"{path} is a checkpoint, not an artifact{_convert_hint(path)}")
    raise ArtifactError(f"{path} is not an artifact: it has no {_MANIFEST}")


def _convert_hint(path: Path | str) -> str:
    return f"; convert it first: fut-convert {path} OUT"
