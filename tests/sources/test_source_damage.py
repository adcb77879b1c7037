"""Checkpoint directories whose files are damaged, lead elsewhere, or would run code."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fut_convert.errors import CheckpointError
from fut_convert.sources import open_source
from fut_convert.sources.safetensors_file import SafetensorsFile
from synthetic_checkpoint import CheckpointShape, write_checkpoint

WEIGHTS = "model.safetensors"
LAYER = "model.layers.0"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

Change = Callable[[dict[str, Tensor]], None]


def checkpoint(directory: Path, change: Change | None = None, **sizes: Any) -> Path:
    return write_checkpoint(directory, CheckpointShape(**{"layers": 1, **sizes}), change)


def errors_of(directory: Path) -> list[str]:
    with open_source(str(directory)) as source:
        return [str(p) for p in source.check() if p.severity == "error"]


def test_truncated_shard_is_found_before_any_work(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model", shards=2)
    shard = directory / "model-00002-of-00002.safetensors"
    size = shard.stat().st_size
    os.truncate(shard, size - 100)
    found = errors_of(directory)
    assert len(found) == 1
    assert found[0].startswith(f"{shard.name}: truncated, has {size - 100} bytes where its header says {size}")
    with open_source(str(directory)) as source, pytest.raises(CheckpointError, match="ends inside"):
        for name in source.tensors:
            source.load(name)


def test_file_longer_than_its_header_says(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model")
    with (directory / WEIGHTS).open("ab") as file:
        file.write(b"xx")
    assert any("2 bytes more" in text for text in errors_of(directory))


def _tensors(**offsets: list[int]) -> bytes:
    """A file of I32 numbers at these offsets."""
    entries = {name: {"dtype": "I32", "shape": [1], "data_offsets": where} for name, where in offsets.items()}
    return _header(json.dumps(entries).encode()) + bytes(max(end for _, end in offsets.values()))


def _header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _entry(dtype: bytes, shape: bytes, offsets: bytes) -> bytes:
    text = b'{"a": {"dtype": %b, "shape": %b, "data_offsets": %b}}' % (dtype, shape, offsets)
    return _header(text) + b"0000"


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (b"", "not a safetensors file"),
        (b"\xff" * 64, "not a safetensors file"),
        (struct.pack("<Q", 5000) + b"{}", "fewer than its header"),
        (_header(b"not json"), "cannot be read"),
        (_header(b"[" * 100_000), "cannot be read"),
        (_header(b"[]"), "not an object"),
        (_header(b'{"a": {"dtype": "F32", "shape": [2]}}'), "data_offsets"),
        (_header(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}') + b"0000", "does not fill 4 bytes"),
        (_header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}'), "offsets 4:0"),
        (_entry(b'"F32"', b"[1e999]", b"[0, 4]"), "found [inf], expected up to 16 whole numbers"),
        (_entry(b'"F32"', b"[1]", b"[0, 1e999]"), "found [0, inf]"),
        (_entry(b'"F32"', b'"12"', b"[0, 4]"), "found '12'"),
        (_entry(b'"F32"', b"[1, true]", b"[0, 4]"), "found [1, True]"),
        (_entry(b'"F32"', b"[0" + b", 9" * 20 + b"]", b"[0, 0]"), "expected up to 16"),
        (_entry(b'"F32"', b"[0, 4611686018427387904]", b"[0, 0]"), "more than any file holds"),
        (_entry(b'"F32"', b"[1]", b"[0, " + b"9" * 4000 + b"]"), "more than any file holds"),
        (_entry(b"[]", b"[1]", b"[0, 4]"), "dtype []"),
        (_entry(b'"F32"', b"[1]", b"[0, 4, 8]"), "offsets [0, 4, 8]"),
        (_header(b'{"a": {}, "a": {}}'), "the key 'a' stands twice"),
        (_tensors(a=[0, 4], b=[2, 6]), "b begins at byte 132 of the file, expected 134"),
        (_tensors(a=[0, 4], b=[8, 12]), "b begins at byte 139 of the file, expected 135"),
        (_tensors(a=[4, 8]), "a begins at byte 73 of the file, expected 69"),
        (_header(b'{"\\ud800": {}}'), "surrogates not allowed"),
    ],
)
def test_unreadable_safetensors(tmp_path: Path, contents: bytes, reason: str) -> None:
    directory = checkpoint(tmp_path / "model")
    (directory / WEIGHTS).write_bytes(contents)
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
        open_source(str(directory))
    assert reason in str(caught.value)


def test_no_memory_is_taken_for_what_the_file_does_not_hold(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    size = 1 << 50
    path.write_bytes(_entry(b'"F32"', b"[%d]" % size, b"[0, %d]" % (4 * size)))
    file = SafetensorsFile(path, path.name)
    assert "truncated" in str(file.problems[0])
    with pytest.raises(CheckpointError, match=rf"ends inside a, {4 * size - 4} bytes early"):
        file.read(file.tensors["a"])
    file.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_value_that_is_not_finite_is_found_when_read(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.mlp.up_proj.weight"][7, 5] = value

    with open_source(str(checkpoint(tmp_path / "model", damage, dtype=dtype))) as source:
        assert source.check() == []
        assert source.load_rows(f"{LAYER}.mlp.up_proj.weight", 0, 7).shape == (7, 128)
        name = f"{LAYER}.mlp.up_proj.weight"
        for start in (0, 5):
            with pytest.raises(CheckpointError, match=rf"model\.safetensors: {name} holds 1 values .*first in row 7;"):
                source.load_rows(name, start, 192)


class _Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch executed",))


def test_pickle_with_code_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = checkpoint(tmp_path / "model", pickled=True)
    torch.save({EMBEDDING: torch.ones(2), "x": _Malicious()}, directory / "pytorch_model.bin")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: refused, its pickle holds more than tensors"):
        open_source(str(directory))
    assert not (tmp_path / "executed").exists()


def test_truncated_or_foreign_pickle(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model", pickled=True)
    path = directory / "pytorch_model.bin"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        open_source(str(directory))
    torch.save({"state_dict": {EMBEDDING: torch.ones(2)}}, path)
    with pytest.raises(CheckpointError, match="not a plain state dict"):
        open_source(str(directory))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:300] + b"R" + data[300:],
        lambda data: data.replace(b"_rebuild_tensor_v2", b"_rebuild_parameter"),
        lambda data: data.replace(b"FloatStorage", b"FloatStoragf"),
        lambda data: b"\x80\x02." + data[3:],
        lambda data: b"\x80\x02X\xff\xff\xff\x7fa.",
        lambda data: b"PK\x03\x04" + data[4:100],
    ],
)
def test_damaged_pickle_is_told_whatever_the_unpickler_says(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    directory = checkpoint(tmp_path / "model", pickled=True)
    path = directory / "pytorch_model.bin"
    for zipped in (True, False):
        torch.save({EMBEDDING: torch.ones(2)}, path, _use_new_zipfile_serialization=zipped)
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: (refused|cannot be read|not a plain)"):
            open_source(str(directory))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, "leads out of it") for name in ("../outside", "/etc/passwd", "a/../../x", "..\\x", "")),
        ("a\0b", "no name of a file"),
        ("x" * 5000, "no name of a file"),
        ("itself", "no name of a file|is missing"),
        ("\ud800", "not valid JSON"),
    ],
)
def test_index_that_leads_out_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    directory = checkpoint(tmp_path / "model", shards=2)
    index = directory / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"][HEAD] = name
    index.write_text(json.dumps(data))
    (directory / "itself").symlink_to("itself")
    with pytest.raises(CheckpointError, match=reason):
        open_source(str(directory))


def test_index_and_files_that_disagree(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model", shards=2)
    index = directory / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"][HEAD] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(data))
    found = errors_of(directory)
    assert any("says that model-00001-of-00002.safetensors holds lm_head.weight" in text for text in found)
    assert any("does not say" in text for text in found)
    (directory / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors is missing"):
        open_source(str(directory))
    index.write_text('{"weight_map": []}')
    with pytest.raises(CheckpointError, match="weight_map is not"):
        open_source(str(directory))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_json_nested_without_end(tmp_path: Path, name: str) -> None:
    directory = checkpoint(tmp_path / "model", shards=2)
    (directory / name).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=f"{name}: not valid JSON"):
        open_source(str(directory))


def test_key_that_stands_twice_and_number_beyond_all_bounds(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model")
    config = (directory / "config.json").read_text().rstrip()
    (directory / "config.json").write_text(config.removesuffix("}") + ', "vocab_size": 9}')
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON \(the key 'vocab_size' stands twice"):
        open_source(str(directory))
    (directory / "config.json").write_text(config.replace("1e-05", "1" + "0" * 400))
    with pytest.raises(CheckpointError, match=r"rms_norm_eps is 10+…, expected a positive number"):
        open_source(str(directory))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_links_out_of_the_checkpoint_are_not_followed(tmp_path: Path, name: str) -> None:
    directory = checkpoint(tmp_path / "model")
    (directory / name).rename(tmp_path / name)
    (directory / name).symlink_to(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name} is a link that leads out"):
        open_source(str(directory)).side_files()


def test_links_within_the_checkpoint_only(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model")
    (tmp_path / "elsewhere").write_bytes((directory / WEIGHTS).read_bytes())
    (directory / WEIGHTS).rename(directory / "real.safetensors")
    (directory / WEIGHTS).symlink_to("real.safetensors")
    assert errors_of(directory) == []
    (directory / WEIGHTS).unlink()
    (directory / WEIGHTS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="a link that leads out"):
        open_source(str(directory))


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    snapshot = checkpoint(tmp_path / "models--a--b" / "snapshots" / "0123abc")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for path in list(snapshot.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(Path("../../blobs") / path.name)
    with open_source(str(snapshot)) as source:
        assert source.check() == []
        assert dict(source.side_files())["config.json"].samefile(blobs / "config.json")  # type: ignore[union-attr]
