"""A calibration data set on the Hub: its revision pinned to a commit, its documents streamed one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from huggingface_hub import HfApi, constants

import fut_runtime.errors
from fut_convert.errors import ConvertError, HubError
from fut_convert.sources.hub import DEFAULT_REVISION
from fut_runtime.hub.failures import Repository
from fut_runtime.hub.requests import ask_hub
from fut_runtime.hub.secrets import redacted

FORM = "hub:OWNER/NAME[/CONFIG][@REVISION][:SPLIT]"
DEFAULT_SPLIT = "train"
_REFERENCE = re.compile(
    r"hub:(?P<name>[\w.-]+(/[\w.-]+)?)(/(?P<config>[^/@:]+))?(@(?P<revision>[^@:]+))?(:(?P<split>[^@:]+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubDataset:
    """What a `hub:` reference says.

    Attributes:
        name: `owner/name`, or `name` alone.
        config: the data set's configuration, or None for its only or default one.
        revision: branch, tag or commit.
        split: name of a whole split; streams have no slices.
    """

    name: str
    config: str | None
    revision: str
    split: str


def parse_hub_dataset(reference: str) -> HubDataset:
    """Take a reference of the form `FORM` apart.

    Raises:
        ConvertError: it has another form.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise ConvertError(f"calibration text {reference}: expected {FORM}")
    revision, split = match["revision"] or DEFAULT_REVISION, match["split"] or DEFAULT_SPLIT
    return HubDataset(match["name"], match["config"], revision, split)


def open_hub_dataset(reference: str, field: str) -> tuple[Iterator[str], dict[str, Any]]:
    """The documents of a data set, streamed in its order, and what identifies it.

    Args:
        reference: `hub:…`, see `FORM`.
        field: column that holds the text.

    Raises:
        HubError: the data set, revision, configuration or split cannot be fetched.
        ConvertError: the package `datasets` is not installed, or the reference has another form. Reading raises it too:
            a document without the field, or one that is no text.
    """
    wanted = parse_hub_dataset(reference)
    try:
        import datasets
    except ImportError as error:
        raise ConvertError(
            f"calibration text {reference}: reading a data set takes the package datasets, which is not installed; "
            "pip install 'futransformer[datasets]', or give a text or JSONL file"
        ) from error
    commit = _commit(wanted, reference)
    try:
        # From version 4 on the package executes no code of a data set, and the extra asks for that.
        rows = datasets.load_dataset(wanted.name, wanted.config, split=wanted.split, revision=commit, streaming=True)
    except Exception as error:  # the package raises what its readers raise
        raise HubError(f"calibration text {reference}: {_first_line(error)}") from error
    identity = {
        "kind": "hub",
        "dataset": wanted.name,
        "config": wanted.config,
        "revision": wanted.revision,
        "commit": commit,
        "split": wanted.split,
        "field": field,
    }
    return _documents(rows, field, reference), identity


def _commit(wanted: HubDataset, reference: str) -> str:
    """The commit that the revision is now."""
    if _COMMIT.fullmatch(wanted.revision):
        return wanted.revision
    where = f"calibration text {reference}"
    if constants.HF_HUB_OFFLINE:
        raise HubError(
            f"{where}: HF_HUB_OFFLINE is set, so {wanted.revision} cannot be resolved; unset it, or give a text or "
            "JSONL file"
        )
    repo = Repository(wanted.name, wanted.revision, dataset=True, local=False, name=where)
    try:
        sha = ask_hub(lambda: HfApi().dataset_info(wanted.name, revision=wanted.revision).sha, repo)
    except fut_runtime.errors.HubError as error:
        raise HubError(f"{error} (expected {FORM}; a text or JSONL file does as well)") from error
    if sha is None:
        raise HubError(f"{where}: {repo.address} names no commit for {wanted.revision!r}; give one after @")
    return sha


def _documents(rows: Any, field: str, reference: str) -> Iterator[str]:
    where = f"calibration text {reference}"
    number = 0
    iterator = iter(rows)
    while True:
        try:
            row = next(iterator, None)
        except Exception as error:  # the package raises what its readers raise
            raise HubError(f"{where}, row {number}: {_first_line(error)}") from error
        if row is None:
            return
        if field not in row:
            raise ConvertError(
                f"{where}, row {number}: has no {field!r}, but {', '.join(map(repr, row))}; name the field with "
                "--calibration-field"
            )
        if not isinstance(row[field], str):
            raise ConvertError(
                f"{where}, row {number}: {field!r} is {type(row[field]).__name__}, expected a text; name its field "
                "with --calibration-field"
            )
        yield row[field]
        number += 1


def _first_line(error: Exception) -> str:
    return redacted((str(error).splitlines() or [type(error).__name__])[0])
