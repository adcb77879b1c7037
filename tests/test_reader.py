"""The reader: decoded matrices, and the refusal of everything that is not a whole artifact of a known version."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fut_runtime.artifact.fragment import NIBBLE_ORDERS, pack_codes, pack_scales
from fut_runtime.artifact.hashing import CHUNK_BYTES, hash_bytes
from fut_runtime.artifact.manifest import FORMAT_VERSION
from fut_runtime.artifact.paths import FILES_FILE, INDEX_FILE, MANIFEST_FILE, MARKER_FILE
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.rows import to_stored_rows
from fut_runtime.artifact.seal import marker_text, read_files
from fut_runtime.errors import ArtifactError, UnsupportedError
from mapped_pages import mapped_kilobytes
from test_manifest import json_values
from tiny_artifact import MODEL, make_manifest, random_tensors, weight_spec, write_artifact

SHARD = "model-00001-of-00001.safetensors"


@pytest.mark.parametrize("nibble_order", sorted(NIBBLE_ORDERS))
@pytest.mark.parametrize("module", ["qkv", "gate_up", "down"])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_codes_and_scales_are_exactly_those_packed(
    tmp_path: Path, module: str, nibble_order: str, group_size: int
) -> None:
    manifest = make_manifest()
    name = f"layers.1.{module}"
    spec = weight_spec(MODEL, module, "int4", group_size=group_size, nibble_order=nibble_order)
    manifest.weights[name]["int4"] = spec
    rows, cols = spec.shape
    padded_rows, padded_cols = spec.padded_shape
    codes = torch.randint(0, 16, (rows, padded_cols), dtype=torch.uint8)
    scales = torch.randn(rows, padded_cols // group_size).bfloat16()
    tensors = random_tensors(manifest)
    tensors[f"{name}.int4"] = pack_codes(to_stored_rows(codes, spec.row_order, padded_rows), nibble_order)
    tensors[f"{name}.int4_scale"] = pack_scales(to_stored_rows(scales, spec.row_order, padded_rows))
    artifact = Artifact.open(write_artifact(tmp_path / "out", manifest, tensors=tensors))
    found_codes, found_scales = artifact.codes_and_scales(name)
    assert torch.equal(found_codes, codes) and torch.equal(found_scales, scales)
    expected = (codes.numpy().astype(np.float32) - 8) * np.repeat(scales.float().numpy(), group_size, axis=1)
    np.testing.assert_array_equal(artifact.dequantized(name, "int4").numpy(), expected[:, :cols])


@pytest.mark.parametrize("module", ["qkv", "gate_up"])
@pytest.mark.parametrize("weight_format", ["e4m3", "bf16"])
def test_other_formats_are_decoded(tmp_path: Path, module: str, weight_format: str) -> None:
    manifest = make_manifest(formats=("e4m3", "bf16"))
    tensors = random_tensors(manifest)
    spec = manifest.weights[f"layers.0.{module}"][weight_format]
    rows, cols = spec.shape
    weight = torch.randn(rows, cols)
    weight = weight.to(torch.float8_e4m3fn).float() if weight_format == "e4m3" else weight.bfloat16().float()
    padded = torch.zeros(rows, spec.padded_shape[1])
    padded[:, :cols] = weight
    name = f"layers.0.{module}.{weight_format}"
    stored = to_stored_rows(padded, spec.row_order, spec.padded_shape[0])
    tensors[name] = stored.to(tensors[name].dtype)
    expected = weight
    if weight_format == "e4m3":
        scale = torch.rand(rows) + 0.5
        tensors[f"{name}_scale"] = to_stored_rows(scale, spec.row_order, spec.padded_shape[0])
        expected = weight * scale[:, None]
    artifact = Artifact.open(write_artifact(tmp_path / "out", manifest, tensors=tensors))
    assert torch.equal(artifact.dequantized(f"layers.0.{module}", weight_format), expected)
    half = artifact.dequantized(f"layers.0.{module}", weight_format, torch.bfloat16)
    assert torch.equal(half, expected.bfloat16()) and half.is_contiguous()


def test_stored_weights_and_lookups(tmp_path: Path) -> None:
    artifact = Artifact.open(str(write_artifact(tmp_path / "out", side_files={"tokenizer.json": b"{}"})))
    stored = artifact.weight("layers.0.o", "int4")
    assert stored.data.dtype == torch.int32 and stored.scale is not None and stored.scale.dtype == torch.bfloat16
    assert artifact.weight("layers.0.o", "e4m3").data.dtype == torch.float8_e4m3fn
    assert artifact.has("embed") and not artifact.has("head.bf16")
    assert artifact.spec("embed").shape == (50, 72)
    with pytest.raises(UnsupportedError, match="stored as e4m3, int4, not as bf16"):
        artifact.weight("layers.0.o", "bf16")
    with pytest.raises(UnsupportedError, match="head is not stored"):
        artifact.weight("head", "int4")
    with pytest.raises(ArtifactError, match="no tensor 'x'"):
        artifact.tensor("x")
    with pytest.raises(ArtifactError, match="no side file"):
        artifact.side_file("fut_config.json")


def test_changing_a_tensor_does_not_reach_the_file(tmp_path: Path) -> None:
    out = write_artifact(tmp_path / "out")
    tensor = Artifact.open(out).tensor("embed")
    tensor.zero_()
    assert Artifact.open(out, verify=True).tensor("embed").abs().sum() > 0


@pytest.fixture
def artifact_dir(tmp_path: Path) -> Path:
    return write_artifact(tmp_path / "out", side_files={"tokenizer.json": b"{}"})


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def reseal(root: Path, *changed: str) -> None:
    """Make hashes and marker fit changed files again, as a hostile or buggy writer would."""
    files = json.loads((root / FILES_FILE).read_text())
    for name in changed:
        digest = hash_bytes((root / name).read_bytes())
        files["files"][name] = {"size": digest.size, "sha256": digest.sha256, "chunks": list(digest.chunks)}
    text = json.dumps(files)
    (root / FILES_FILE).write_text(text)
    (root / MARKER_FILE).write_text(marker_text(text))


def newer_manifest(root: Path) -> None:
    edit_json(root / MANIFEST_FILE, format_version=FORMAT_VERSION + 1)
    reseal(root, MANIFEST_FILE)


def other_shapes(root: Path) -> None:
    text = (root / MANIFEST_FILE).read_text().replace('"vocab_size": 50', '"vocab_size": 51')
    (root / MANIFEST_FILE).write_text(text)
    reseal(root, MANIFEST_FILE)


def renamed_tensor(root: Path) -> None:
    path = root / SHARD
    path.write_bytes(path.read_bytes().replace(b'"embed"', b'"embec"'))
    reseal(root, SHARD)


def wrong_index(root: Path) -> None:
    path = root / INDEX_FILE
    path.write_text(path.read_text().replace("embed", "embec"))
    reseal(root, INDEX_FILE)


def truncated(root: Path) -> None:
    with (root / SHARD).open("r+b") as file:
        file.truncate(100_000)


def link_out(root: Path) -> None:
    target = root.parent / "elsewhere"
    shutil.move(root / "tokenizer.json", target)
    (root / "tokenizer.json").symlink_to(target)


def traversal(root: Path) -> None:
    path = root / FILES_FILE
    path.write_text(path.read_text().replace('"tokenizer.json"', '"../tokenizer.json"'))
    reseal(root)


@given(
    st.dictionaries(st.sampled_from(["size", "sha256", "chunks", "x"]), json_values)
    | st.fixed_dictionaries({"size": json_values, "sha256": json_values, "chunks": json_values})
    | json_values,
    st.text(max_size=8),
)
def test_any_list_of_files_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, entry: Any, name: str) -> None:
    root = tmp_path_factory.getbasetemp()
    files = {"format": "futransformer", "format_version": 1, "chunk_bytes": CHUNK_BYTES, "files": {name: entry}}
    (root / FILES_FILE).write_text(json.dumps(files))
    with pytest.raises(ArtifactError):
        read_files(root, None)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda root: (root / MARKER_FILE).unlink(), "not sealed"),
        (shutil.rmtree, "is no directory"),
        (lambda root: [p.unlink() for p in root.glob("fut_*")], "not a FuTransformer artifact"),
        (lambda root: (root / MARKER_FILE).write_text("{}"), 'no "format"'),
        (lambda root: edit_json(root / MARKER_FILE, format_version=2), "newer"),
        (lambda root: edit_json(root / MARKER_FILE, sha256="0"), "SHA-256"),
        (lambda root: edit_json(root / MARKER_FILE, files="other.json"), "damaged"),
        (lambda root: edit_json(root / FILES_FILE, files={}), "the file was changed"),
        (newer_manifest, "format version 2 is newer than 1"),
        (lambda root: edit_json(root / MANIFEST_FILE, head="int4"), f"{MANIFEST_FILE}: .*expected"),
        (lambda root: (root / MANIFEST_FILE).unlink(), "is missing"),
        (lambda root: (root / SHARD).unlink(), f"{SHARD}: is missing"),
        (truncated, rf"{SHARD}: 100000 bytes, expected \d+"),
        (lambda root: (root / "tokenizer.json").write_text("[]"), "tokenizer.json: SHA-256"),
        (lambda root: (root / "tokenizer.json").unlink(), "tokenizer.json: is missing"),
        (other_shapes, r"'embed' is BF16 \[50, 72\], expected BF16 \[51, 72\]"),
        (renamed_tensor, "'embec' is not in the manifest"),
        (wrong_index, "weight_map"),
        (link_out, "links out are not followed"),
        (traversal, "unsafe file name"),
    ],
)
def test_damage_is_refused(artifact_dir: Path, damage: Callable[[Path], object], expected: str) -> None:
    damage(artifact_dir)
    with pytest.raises(ArtifactError, match=expected):
        Artifact.open(artifact_dir)


def test_a_flipped_bit_in_a_shard_is_found_on_demand(artifact_dir: Path) -> None:
    path = artifact_dir / SHARD
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    Artifact.open(artifact_dir)
    with pytest.raises(ArtifactError, match=f"{SHARD}: chunk 0"):
        Artifact.open(artifact_dir, verify=True)


def test_pages_that_were_read_can_be_given_back(artifact_dir: Path) -> None:
    artifact = Artifact.open(artifact_dir)
    embed = artifact.tensor("embed")
    before = embed.clone()
    assert mapped_kilobytes(artifact_dir) > 0
    artifact.release_pages()
    assert mapped_kilobytes(artifact_dir) == 0
    assert torch.equal(embed, before)


def test_a_shard_that_has_gone_since(artifact_dir: Path) -> None:
    artifact = Artifact.open(artifact_dir)
    truncated(artifact_dir)
    with pytest.raises(ArtifactError, match=f"{SHARD}: cannot be mapped into memory"):
        artifact.tensor("embed")


def test_a_download_through_the_hub_cache_opens(tmp_path: Path) -> None:
    """The Hub's cache is a snapshot of links to blobs."""
    real = write_artifact(tmp_path / "out")
    snapshot = tmp_path / "cache" / "snapshots" / "0123"
    blobs = tmp_path / "cache" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(real.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert Artifact.open(snapshot, verify=True).manifest.model == MODEL
