"""Calibration texts from JSONL files and from data sets on the Hub."""

from __future__ import annotations

import builtins
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import HfHubHTTPError

from fut_convert import hub_dataset, plan_conversion
from fut_convert.calibration_documents import open_calibration_text
from fut_convert.calibration_text import calibration_windows
from fut_convert.errors import ConvertError, HubError
from fut_convert.hub_dataset import HubDataset, parse_hub_dataset
from fut_convert.recipe import CalibrationRecipe
from fut_convert.sources import open_source

Make = Callable[..., Path]
DOCUMENTS = ["The first document, of some words.", "A second one.", "Ein drittes: größer.", "and a fourth one"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def text_of(path: Path | str, characters: int = 10**9, **recipe: str) -> str:
    return open_calibration_text(CalibrationRecipe(text=str(path), **recipe)).read(characters)


def test_documents_are_joined_by_blank_lines(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": t, "id": i} for i, t in enumerate(DOCUMENTS)])
    assert text_of(path) == "\n\n".join(DOCUMENTS)
    path.write_text("\ufeff" + "\n \n".join(json.dumps({"body": t}) for t in [DOCUMENTS[0], " \n", *DOCUMENTS[1:]]))
    assert text_of(path, field="body") == "\n\n".join(DOCUMENTS)


def test_the_windows_are_those_of_the_joined_text(tiny_checkpoint: Make, tmp_path: Path) -> None:
    documents = [f"{t} {i}" for i in range(30) for t in DOCUMENTS]
    jsonl = write_jsonl(tmp_path / "a.ndjson", [{"text": t} for t in documents])
    plain = tmp_path / "a.txt"
    plain.write_text("\n\n".join(documents))
    sizes = {"windows": 5, "window_tokens": 48}
    with open_source(str(tiny_checkpoint())) as source:
        got, expected = (calibration_windows(source, CalibrationRecipe(text=str(p), **sizes)) for p in (jsonl, plain))  # type: ignore[arg-type]
    assert got.ids.tolist() == expected.ids.tolist()
    read = got.record.pop("documents")
    assert 1 < read <= len(documents)
    assert got.record == {
        "text": "a.ndjson", "field": "text", "sha256": hashlib.sha256(jsonl.read_bytes()).hexdigest(), **sizes
    }  # fmt: skip


def test_no_more_lines_are_read_than_needed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * 50}] * 3 + ["not an object"])
    text = open_calibration_text(CalibrationRecipe(text=str(path)))
    assert text.read(100) == text.read(101) == "x" * 50 + "\n\n" + "x" * 50
    assert text.record()["documents"] == 2
    with pytest.raises(ConvertError, match="line 4"):
        text.read(1000)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "a.jsonl, line 3: not JSON"),
        (b'"a text"', "a.jsonl, line 3: is str, expected an object with a text in 'text'"),
        (b'{"content": "x", "id": 3}', "line 3: has no 'text', but 'content', 'id'; name the field with --calib"),
        (b"{}", "line 3: has no 'text', but nothing"),
        (b'{"text": ["x"]}', "line 3: 'text' is list, expected a text"),
        (b'{"text": "\xff"}', "a.jsonl, line 3: not UTF-8"),
        (b"[" * 100_000, "a.jsonl, line 3: not JSON"),
    ],
)
def test_a_bad_line_is_named(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(ConvertError, match=message):
        text_of(path)


def test_a_jsonl_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"nowhere\.jsonl: No such file"):
        text_of(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("hub:wikitext", HubDataset("wikitext", None, "main", "train")),
        ("hub:own.er/na-me", HubDataset("own.er/na-me", None, "main", "train")),
        ("hub:a/b/en", HubDataset("a/b", "en", "main", "train")),
        ("hub:a/b:test", HubDataset("a/b", None, "main", "test")),
        (f"hub:a/b/c-v1@{COMMIT}:dev", HubDataset("a/b", "c-v1", COMMIT, "dev")),
        ("hub:a/b@refs/convert/parquet", HubDataset("a/b", None, "refs/convert/parquet", "train")),
    ],
)
def test_references_are_taken_apart(reference: str, expected: HubDataset) -> None:
    assert parse_hub_dataset(reference) == expected


@pytest.mark.parametrize("reference", ["hub:", "hub:a/b:", "hub:a/b@", "hub:a b", "hub:a/b:train[:1%]:x", "hub:/b"])
def test_other_references_are_refused(reference: str) -> None:
    with pytest.raises(ConvertError, match="expected hub:OWNER/NAME"):
        parse_hub_dataset(reference)


@pytest.fixture
def local_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set of Parquet files in a directory, read by the real package, and a Hub that says which commit it is."""
    datasets = pytest.importorskip("datasets")
    data = tmp_path / "data"
    rows = {"text": DOCUMENTS * 40, "number": list(range(4 * 40))}
    for split in ("train", "validation"):
        (data / split).mkdir(parents=True)
        datasets.Dataset.from_dict(rows).to_parquet(data / split / "0.parquet")
    asked: list[tuple[str, str | None, str, bool]] = []
    load = datasets.load_dataset

    def from_directory(name: str, config: str | None, *, split: str, revision: str, streaming: bool) -> Any:
        asked.append((name, config, revision, streaming))
        files = {s: str(data / s / "*.parquet") for s in ("train", "validation")}
        return load("parquet", data_files=files, split=split, streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", from_directory)
    monkeypatch.setattr(hub_dataset.HfApi, "dataset_info", lambda self, name, revision: SimpleNamespace(sha=COMMIT))
    monkeypatch.setattr(hub_dataset.constants, "HF_HUB_OFFLINE", False)
    local_hub.asked = asked  # type: ignore[attr-defined]
    return data


def test_a_data_set_is_pinned_streamed_and_recorded(local_hub: Path, tiny_checkpoint: Make, tmp_path: Path) -> None:
    options = {
        "calibration.text": "hub:owner/texts/en@v2:validation", "calibration.windows": 4,
        "calibration.window_tokens": 64, "calibration.allow_few_tokens": True,
    }  # fmt: skip
    plan = plan_conversion(str(tiny_checkpoint()), tmp_path / "out", overrides=options)
    assert local_hub_calls() == [("owner/texts", "en", COMMIT, True)]
    record = plan.manifest.calibration
    assert record is not None
    joined = "\n\n".join((DOCUMENTS * 40)[: record.pop("documents")])
    assert record == {
        "text": "hub:owner/texts/en@v2:validation", "kind": "hub", "dataset": "owner/texts", "config": "en",
        "revision": "v2", "commit": COMMIT, "split": "validation", "field": "text",
        "sha256": hashlib.sha256(joined.encode()).hexdigest(), "windows": 4, "window_tokens": 64,
    }  # fmt: skip
    assert plan.manifest.recipe["calibration"]["text"] == "hub:owner/texts/en@v2:validation"


def local_hub_calls() -> list[tuple[str, str | None, str, bool]]:
    return local_hub.asked  # type: ignore[attr-defined,no-any-return]


def test_a_commit_is_not_looked_up(local_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_dataset.constants, "HF_HUB_OFFLINE", True)
    other = COMMIT[::-1]
    assert text_of(f"hub:owner/texts@{other}").startswith(DOCUMENTS[0] + "\n\n")
    assert local_hub_calls()[-1][2] == other
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set, so main cannot be resolved"):
        text_of("hub:owner/texts")


@pytest.mark.parametrize(
    ("field", "message"), [("body", "row 0: has no 'body', but 'text', 'number'"), ("number", "'number' is int")]
)
def test_rows_without_a_text_are_refused(field: str, message: str, local_hub: Path) -> None:
    with pytest.raises(ConvertError, match=message):
        text_of("hub:owner/texts", field=field)


def test_a_split_that_is_not_there_is_refused(local_hub: Path) -> None:
    with pytest.raises(HubError, match="tset"):
        text_of("hub:owner/texts:tset")


def test_a_hub_out_of_reach_is_reported(local_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    response: Any = SimpleNamespace(headers={}, request=None)
    for error in (ConnectionError("no route"), HfHubHTTPError("HTTP 503", response=response)):

        def fail(*_: Any, error: Exception = error, **__: Any) -> Any:
            raise error

        monkeypatch.setattr(hub_dataset.HfApi, "dataset_info", fail)
        with pytest.raises(HubError, match="cannot be reached"):
            text_of("hub:owner/texts")


def test_the_extra_is_named_where_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without_datasets(name: str, *rest: Any) -> Any:
        if name == "datasets":
            raise ModuleNotFoundError("No module named 'datasets'")
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_datasets)
    with pytest.raises(ConvertError, match=r"pip install 'futransformer\[datasets\]'"):
        text_of("hub:owner/texts")
