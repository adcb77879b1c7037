"""Reading checkpoints: whatever the format, `open_source` gives a model specification and named tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from fut_convert.errors import CheckpointError
from fut_convert.sources.base import Problem, SideFile, Source, TensorInfo
from fut_convert.sources.grouped_codes import Packing

__all__ = ["Packing", "Problem", "SideFile", "Source", "TensorInfo", "open_source"]

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
#: Of a model's page, as a browser shows it.
_ADDRESS = re.compile(r"https?://[\w.:-]+/(?P<id>[\w.-]+/[\w.-]+)", re.ASCII)


def open_source(
    model: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    stream: bool = False,
    fetch: bool = True,
    before_fetching: Callable[[Source], None] | None = None,
) -> Source:
    """Open a checkpoint: a directory, a `.gguf` file, or a model on the Hub.

    Args:
        model: what exists as a path is opened as one; anything else is a Hub id.
        revision: Hub only: branch, tag or commit.
        token: Hub only: access token; that of the environment or of the Hub's login when None.
        stream: Hub only: leave the weights there, to be fetched while they are converted.
        fetch, before_fetching: Hub only, see `open_hub_model`.

    Raises:
        CheckpointError: no such path, or a checkpoint that cannot be read.
        UnsupportedModelError: a model that cannot be converted, with the reason.
        HubError: the Hub does not give it.
    """
    if not model:
        raise CheckpointError(
            "the name of the model is empty: give a directory, a .gguf file, or a Hub id (owner/name)"
        )
    path = Path(model).expanduser()
    if path.exists():
        if revision is not None:
            raise CheckpointError(f"{model}: is a local path, which has no revision {revision!r}")
        if stream:
            raise CheckpointError(f"{model}: is here already; --stream is for models on the Hub")
        return _open_path(path)
    if not _HUB_ID.fullmatch(model) or model.startswith(".") or path.suffix in (".gguf", ".safetensors", ".bin"):
        address = _ADDRESS.match(model)
        hint = f"; give its id alone: {address['id']}" if address else ""
        raise CheckpointError(f"{model}: no such file or directory, and not a Hub id (owner/name){hint}")
    # The Hub's client is slow to import and of no use to local checkpoints.
    from fut_convert.sources.hub import open_hub_model

    return open_hub_model(model, revision, token, stream=stream, fetch=fetch, before_fetching=before_fetching)


def _open_path(path: Path) -> Source:
    if path.is_dir():
        from fut_convert.sources.directory import DirectorySource

        return DirectorySource(path)
    if not path.is_file():
        raise CheckpointError(f"{path.name}: is neither a file nor a directory, so no checkpoint")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"GGUF":
        from fut_convert.sources.gguf_source import GGUFSource

        return GGUFSource(path)
    if path.suffix == ".gguf":
        raise CheckpointError(f"{path.name}: not a GGUF file (it begins with {magic!r})")
    raise CheckpointError(f"{path.name}: a single file of this kind is no checkpoint; give the directory it is in")
