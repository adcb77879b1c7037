"""Tensors of an artifact in one block of memory: what is loaded, where it lies, and what the library is told of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fut_runtime.artifact.layout import TensorSpec, all_tensors
from fut_runtime.artifact.reader import Artifact
from fut_runtime.cuda import arena as arena_module
from fut_runtime.cuda.arena import TENSOR_ALIGN, ArenaPlan, _cut, fill
from fut_runtime.cuda.structs import Format, RowOrder
from fut_runtime.cuda.tensors import DeviceTensors, check_supported, choose_decode_mode, needed_tensors
from fut_runtime.errors import ArtifactError, UnsupportedError
from tiny_artifact import MODEL, make_manifest, write_artifact

EVEN = replace(MODEL, hidden_size=64, qkv_bias=True, qk_norm=True)


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    """Three formats, biases, norms per head, and several small shards."""
    manifest = make_manifest(EVEN, formats=("bf16", "e4m3", "int4"))
    return Artifact.open(write_artifact(tmp_path / "out", manifest, max_shard_bytes=60_000))


def loaded(artifact: Artifact, weight_format: str) -> DeviceTensors:
    plan = ArenaPlan.of(needed_tensors(artifact.manifest, weight_format))
    arena = torch.zeros(plan.nbytes, dtype=torch.uint8)
    fill(arena, plan.pieces(artifact))
    return DeviceTensors(artifact.manifest, weight_format, plan.views(arena))


@pytest.mark.parametrize("weight_format", ["int4", "e4m3", "bf16"])
def test_loads_what_one_format_needs_and_no_more(
    artifact: Artifact, weight_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(artifact.shards) > 3
    monkeypatch.setattr(arena_module, "PIECE_BYTES", 1000)
    tensors = loaded(artifact, weight_format).tensors
    others = {"int4", "e4m3", "bf16"} - {weight_format}
    expected = {
        spec.name
        for spec in all_tensors(artifact.manifest)
        # Folded gains are in the weights; only the tied head applies one.
        if not spec.name.endswith(("activation_scale", "hadamard", "attn_norm", "mlp_norm"))
        and not any(f".{other}" in spec.name for other in others)
    }
    assert set(tensors) == expected
    for name, tensor in tensors.items():
        stored = artifact.tensor(name)
        assert tensor.dtype == stored.dtype and tensor.data_ptr() % 16 == 0
        same = tensor[: stored.shape[0]] if name == "embed" else tensor
        assert torch.equal(same.view(torch.uint8), stored.view(torch.uint8)), name
    assert tensors["embed"].shape == (64, 64) and not tensors["embed"][50:].any()


def test_the_library_is_told_what_the_manifest_says(artifact: Artifact) -> None:
    device = loaded(artifact, "int4")
    layer = device.layers()[1]
    tensors = device.tensors
    assert layer.qkv.weight == tensors["layers.1.qkv.int4"].data_ptr()
    assert layer.qkv.scale == tensors["layers.1.qkv.int4_scale"].data_ptr()
    assert layer.qkv.bias == tensors["layers.1.qkv.bias"].data_ptr()
    assert (layer.qkv.gain, layer.o.bias, layer.o.gain) == (None, None, None)
    assert layer.q_norm == tensors["layers.1.q_norm"].data_ptr()
    gate_up = layer.gate_up
    assert (gate_up.format, gate_up.row_order) == (Format.INT4, RowOrder.INTERLEAVE8)
    assert (gate_up.rows, gate_up.cols, gate_up.stored_rows, gate_up.stored_cols) == (200, 64, 208, 64)
    assert (gate_up.group_size, gate_up.scale_is_fp16) == (64, 0)
    head = device.head()
    assert (head.format, head.weight, head.gain) == (
        Format.BF16,
        tensors["embed"].data_ptr(),
        tensors["final_norm"].data_ptr(),
    )
    assert (head.rows, head.cols, head.stored_rows, head.stored_cols) == (50, 64, 64, 64)
    assert loaded(artifact, "e4m3").layers()[0].gate_up.row_order == RowOrder.INTERLEAVE1


@pytest.mark.parametrize("head", ["e4m3", "int4", "bf16"])
def test_gains_that_are_not_folded_and_a_head_of_its_own(tmp_path: Path, head: str) -> None:
    manifest = make_manifest(replace(EVEN, tie_word_embeddings=False), formats=("int4",), head=head, gain="runtime")
    device = loaded(Artifact.open(write_artifact(tmp_path / "out", manifest)), "int4")
    layer, matrix, tensors = device.layers()[0], device.head(), device.tensors
    assert layer.qkv.gain == tensors["layers.0.attn_norm"].data_ptr()
    assert layer.gate_up.gain == tensors["layers.0.mlp_norm"].data_ptr()
    assert (layer.o.gain, layer.down.gain) == (None, None)
    assert matrix.weight == tensors[f"head.{head}"].data_ptr()
    assert matrix.gain == tensors["final_norm"].data_ptr()
    assert matrix.format == {"e4m3": Format.E4M3, "int4": Format.INT4, "bf16": Format.BF16}[head]


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 400)), min_size=1, max_size=12), st.integers(1, 200))
def test_pieces_cover_every_byte_once_and_stay_small(gaps: list[tuple[int, int]], piece_bytes: int) -> None:
    runs, place, target = [], 0, 0
    for gap, nbytes in gaps:
        place += gap
        runs.append((place, target, nbytes))
        place, target = place + nbytes, target + nbytes + 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena_module, "PIECE_BYTES", piece_bytes)
        patch.setattr(arena_module, "_GAP_BYTES", 50)
        pieces = _cut(Path("shard"), runs)
    covered = {}
    for piece in pieces:
        assert 0 < piece.nbytes <= piece_bytes
        assert piece.parts[0].piece_offset == 0
        assert piece.parts[-1].piece_offset + piece.parts[-1].nbytes == piece.nbytes
        for part in piece.parts:
            for i in range(part.nbytes):
                assert part.arena_offset + i not in covered
                covered[part.arena_offset + i] = piece.offset + part.piece_offset + i
    assert covered == {t + i: p + i for p, t, n in runs for i in range(n)}


def test_pieces_of_different_shards_take_turns(artifact: Artifact) -> None:
    pieces = ArenaPlan.of(needed_tensors(artifact.manifest, "int4")).pieces(artifact)
    files = list(dict.fromkeys(piece.file.name for piece in pieces))
    assert len(files) > 2 and [piece.file.name for piece in pieces[: len(files)]] == files


def test_tensors_lie_apart_and_aligned() -> None:
    plan = ArenaPlan.of([TensorSpec("a", "BF16", (3, 5)), TensorSpec("b", "F32", (65,)), TensorSpec("c", "I8", (1,))])
    assert plan.offsets == (0, TENSOR_ALIGN, TENSOR_ALIGN + 2 * TENSOR_ALIGN) and plan.nbytes == 4 * TENSOR_ALIGN


def test_a_file_that_became_shorter_is_an_error(artifact: Artifact) -> None:
    plan = ArenaPlan.of(needed_tensors(artifact.manifest, "int4"))
    pieces = plan.pieces(artifact)
    victim = pieces[-1].file
    with victim.open("r+b") as file:
        file.truncate(pieces[-1].offset + pieces[-1].nbytes - 1)
    with pytest.raises(ArtifactError, match=rf"{victim.name}: ends at byte \d+, expected at least"):
        fill(torch.zeros(plan.nbytes, dtype=torch.uint8), pieces)
    victim.unlink()
    with pytest.raises(ArtifactError, match=rf"{victim.name}: cannot be read \(No such file"):
        fill(torch.zeros(plan.nbytes, dtype=torch.uint8), pieces)


def test_a_tensor_of_another_shape_is_not_loaded(artifact: Artifact) -> None:
    for spec in (TensorSpec("embed", "BF16", (64, 32)), TensorSpec("embed", "F32", (64, 64))):
        with pytest.raises(ArtifactError, match=r"tensor 'embed' is BF16 \[50, 64\], expected"):
            ArenaPlan.of([spec]).pieces(artifact)
    with pytest.raises(ArtifactError, match="has no tensor 'other'"):
        ArenaPlan.of([TensorSpec("other", "F32", (1,))]).pieces(artifact)


@pytest.mark.parametrize(
    ("formats", "asked", "found"),
    [
        (("e4m3", "int4", "bf16"), None, "int4"),
        (("e4m3", "bf16"), None, "fp8"),
        (("bf16",), None, "bf16"),
        (("e4m3", "int4"), "fp8", "fp8"),
    ],
)
def test_takes_the_weights_there_are(tmp_path: Path, formats: tuple[str, ...], asked: str | None, found: str) -> None:
    artifact = Artifact.open(write_artifact(tmp_path / "out", make_manifest(EVEN, formats=formats)))
    assert choose_decode_mode(artifact, asked) == found


def test_refuses_weights_that_are_not_there_and_orders_that_no_kernel_reads(tmp_path: Path) -> None:
    def opened(name: str, manifest: object) -> Artifact:
        return Artifact.open(write_artifact(tmp_path / name, manifest))  # type: ignore[arg-type]

    artifact = opened("plain", make_manifest(EVEN))
    check_supported(artifact, "int4")
    with pytest.raises(UnsupportedError, match=r"needs every projection in bf16: choose decode_mode int4 or fp8"):
        choose_decode_mode(artifact, "bf16")
    with pytest.raises(UnsupportedError, match=r"'int8', expected one of int4, fp8, bf16"):
        choose_decode_mode(artifact, "int8")

    manifest = make_manifest(EVEN)
    for name, change in (("layers.1.o", {"nibble_order": "linear/1"}), ("layers.1.down", {"group_size": 256})):
        spec = replace(manifest.weights[name]["int4"], **change)
        if "group_size" in change:
            spec = replace(spec, padded_shape=(spec.padded_shape[0], 256))
        changed = replace(
            manifest, weights={**manifest.weights, name: {"int4": spec, "e4m3": manifest.weights[name]["e4m3"]}}
        )
        artifact = opened(name, changed)
        with pytest.raises(UnsupportedError, match=rf"{name} \(int4\) .*(linear/1|groups of 256)"):
            check_supported(artifact, "int4")
        check_supported(artifact, "e4m3")
    with pytest.raises(UnsupportedError, match=r"rows of 72 numbers; .*--head e4m3"):
        check_supported(opened("uneven", make_manifest(MODEL)), "int4")
