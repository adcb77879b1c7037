"""Verification: a flipped bit, a truncated shard, a missing file and an extra tensor are found and named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fut_runtime.artifact.hashing import CHUNK_BYTES
from fut_runtime.artifact.layout import all_tensors
from fut_runtime.artifact.paths import FILES_FILE, INDEX_FILE, MANIFEST_FILE, MARKER_FILE
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.shards import TORCH_DTYPES, plan_shards, read_header
from fut_runtime.artifact.verify import VerifyReport, sealed_bytes, verify_artifact
from fut_runtime.errors import ArtifactError
from test_reader import reseal
from tiny_artifact import MODEL, make_manifest, write_artifact


@pytest.fixture
def root(tmp_path: Path) -> Path:
    out = write_artifact(tmp_path / "out", side_files={"tokenizer.json": b'{"a": 1}'}, max_shard_bytes=80_000)
    assert verify_artifact(out).ok
    return out


def flip(path: Path, byte: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ 1 << bit]))


def kinds(report: VerifyReport) -> list[tuple[str, str]]:
    return [(finding.kind, finding.file) for finding in report.findings]


def test_a_whole_artifact(root: Path) -> None:
    seen: list[int] = []
    (root / "report.md").write_text("outside the sealed set")
    report = verify_artifact(root, seen.append)
    assert report.ok and report.unsealed == ("report.md",)
    assert report.nbytes == sum(seen) == sealed_bytes(root)
    assert report.files == len(json.loads((root / FILES_FILE).read_text())["files"])


def test_flipped_bit_in_every_shard_names_the_tensor(root: Path) -> None:
    artifact = Artifact.open(root)
    for shard, places in artifact.shards.items():
        place = places[len(places) // 2]
        flip(root / shard, place.offset + place.spec.nbytes // 2, bit=3)
        (finding,) = verify_artifact(root).findings
        assert (finding.kind, finding.file, finding.chunk) == ("hash", shard, 0)
        assert place.spec.name in finding.tensors
        flip(root / shard, place.offset + place.spec.nbytes // 2, bit=3)
    assert verify_artifact(root).ok


def test_only_tensors_of_the_damaged_chunk_are_named(tmp_path: Path) -> None:
    model = replace(MODEL, vocab_size=500_000)
    manifest = make_manifest(model, formats=("int4",))
    tensors = {spec.name: torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype]) for spec in all_tensors(manifest)}
    out = write_artifact(tmp_path / "out", manifest, tensors=tensors)
    (shard,) = Artifact.open(out).shards
    flip(out / shard, 100_000)
    (finding,) = verify_artifact(out).findings
    assert finding.chunk == 0 and finding.tensors == ("embed",)
    flip(out / shard, 100_000)
    flip(out / shard, CHUNK_BYTES + 1)
    flip(out / shard, (out / shard).stat().st_size - 1)
    (finding,) = verify_artifact(out).findings
    assert finding.chunk == 1 and "embed" in finding.tensors and "layers.1.down.int4_scale" in finding.tensors
    assert "(bytes 67108864 to" in finding.message and finding.message.startswith(str(out / shard))


def test_damage_in_a_header_names_the_shard_and_all_its_tensors(root: Path) -> None:
    shard = "model-00002-of-00003.safetensors"
    members = {place.spec.name for place in read_header(root / shard)}
    flip(root / shard, 8)
    found = verify_artifact(root).findings
    assert {f.kind for f in found} == {"hash", "header"} and {f.file for f in found} == {shard}
    assert all(set(f.tensors) == members for f in found)


def test_truncated_shard(root: Path) -> None:
    shard = "model-00001-of-00003.safetensors"
    places = read_header(root / shard)
    with (root / shard).open("r+b") as file:
        file.truncate(places[-1].offset + 1)
    (size,) = verify_artifact(root).findings
    assert (
        size.kind == "size"
        and size.file == shard
        and size.tensors == (places[-1].spec.name,)
        and "truncated" in size.message
    )


def test_missing_shard_and_side_file(root: Path) -> None:
    shard = "model-00003-of-00003.safetensors"
    members = {place.spec.name for place in read_header(root / shard)}
    (root / shard).unlink()
    (root / "tokenizer.json").unlink()
    report = verify_artifact(root)
    assert sorted(kinds(report)) == [("missing_file", shard), ("missing_file", "tokenizer.json")]
    assert set(next(f for f in report.findings if f.file == shard).tensors) == members


def test_changed_small_files(root: Path) -> None:
    (root / "tokenizer.json").write_text('{"a": 2}')
    flip(root / MANIFEST_FILE, 200)
    assert sorted(kinds(verify_artifact(root))) == [("hash", MANIFEST_FILE), ("hash", "tokenizer.json")]


def test_missing_marker_and_changed_list(root: Path) -> None:
    (root / MARKER_FILE).unlink()
    assert kinds(verify_artifact(root)) == [("not_sealed", MARKER_FILE)]
    text = (root / FILES_FILE).read_text()
    (root / FILES_FILE).write_text(text.replace('"size": ', '"size":  '))
    assert kinds(verify_artifact(root)) == [("not_sealed", MARKER_FILE)]
    (root / FILES_FILE).write_text("{}")
    assert [k for k, _ in kinds(verify_artifact(root))] == ["not_sealed", "file_list"]


def test_list_that_does_not_fit_the_marker(root: Path) -> None:
    files = json.loads((root / FILES_FILE).read_text())
    files["files"]["tokenizer.json"]["sha256"] = "0" * 64
    (root / FILES_FILE).write_text(json.dumps(files))
    assert kinds(verify_artifact(root)) == [("file_list", FILES_FILE), ("hash", "tokenizer.json")]


def test_extra_and_wrong_tensors(root: Path) -> None:
    """A shard rewritten by other hands, with hashes and marker made to fit."""
    shard = "model-00002-of-00003.safetensors"
    specs = [place.spec for place in read_header(root / shard)]
    specs[0] = replace(specs[0], shape=(*specs[0].shape, 1))
    specs[1] = replace(specs[1], name="stowaway")
    (plan,) = plan_shards(specs, 1 << 30)
    (root / shard).write_bytes(plan.header + bytes(plan.nbytes - len(plan.header)))
    reseal(root, shard)
    report = verify_artifact(root)
    assert {k for k, _ in kinds(report)} == {"extra_tensor", "wrong_tensor", "missing_tensor", "index"}
    assert next(f for f in report.findings if f.kind == "extra_tensor").tensors == ("stowaway",)


def test_extra_shard(root: Path) -> None:
    (root / "model-00004-of-00003.safetensors").write_bytes((root / "model-00001-of-00003.safetensors").read_bytes())
    (finding,) = verify_artifact(root).findings
    assert finding.kind == "extra_file" and "embed" in finding.tensors


def test_sealed_but_invalid_manifest_and_index(root: Path) -> None:
    text = (root / MANIFEST_FILE).read_text()
    (root / MANIFEST_FILE).write_text(text.replace('"head": "bf16"', '"head": "int4"'))
    (root / INDEX_FILE).write_text('{"weight_map": {}}')
    reseal(root, MANIFEST_FILE, INDEX_FILE)
    assert kinds(verify_artifact(root)) == [("manifest", MANIFEST_FILE)]
    (root / MANIFEST_FILE).write_text(text)
    reseal(root, MANIFEST_FILE)
    assert kinds(verify_artifact(root)) == [("index", INDEX_FILE)]


def test_link_out_of_the_artifact(root: Path) -> None:
    (root / "tokenizer.json").rename(root.parent / "elsewhere")
    (root / "tokenizer.json").symlink_to(root.parent / "elsewhere")
    assert kinds(verify_artifact(root)) == [("missing_file", "tokenizer.json")]


def test_no_artifact_at_all(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is no directory"):
        verify_artifact(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match="not a FuTransformer artifact"):
        verify_artifact(tmp_path)
