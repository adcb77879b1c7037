"""GGUF models: weights, config and refusals, with the gguf package's reader as the independent opinion."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from gguf_models import Tensors, float_tensors, gguf_name, reorder_rows, stored_tensors, write_gguf
from hypothesis import given
from hypothesis import strategies as st

from fut_convert.errors import CheckpointError, ConvertError, UnsupportedModelError
from fut_convert.sources import open_source
from fut_convert.sources.config import model_spec
from fut_convert.sources.gguf_file import GGUFFile, shortest_decimal
from fut_convert.sources.gguf_rope import llama3_factors, llama3_scaling
from fut_convert.sources.gguf_source import GGUFSource, hugging_face_name, restore_head_rows
from fut_runtime.artifact.spec import RopeSpec
from synthetic_checkpoint import CheckpointShape

SHAPE = CheckpointShape(layers=1)
WIDE = CheckpointShape(layers=1, hidden=256, heads=4, kv_heads=2, intermediate=512)
EMBEDDING = "model.embed_tokens.weight"
Q = "model.layers.0.self_attn.q_proj.weight"

SIMPLE_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_float_model_comes_back_whole(tmp_path: Path, family: str, tied: bool) -> None:
    shape = CheckpointShape(family=family, tied=tied)
    with open_source(str(write_gguf(tmp_path / "model.gguf", shape))) as source:
        assert source.check() == []
        assert source.identity == {"kind": "gguf", "name": "model.gguf"}
        expected = float_tensors(shape)
        assert set(source.tensors) == set(expected)
        for name, values in expected.items():
            assert torch.equal(source.load(name), torch.from_numpy(values)), name
        spec = source.spec
        assert spec.tie_word_embeddings == tied
        assert (spec.qkv_bias, spec.o_bias, spec.qk_norm) == (family == "qwen2", False, family == "qwen3")
        assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 1, 64)
        assert spec.rms_norm_eps == 1e-5
        assert (spec.bos_token_id, spec.eos_token_ids, spec.pad_token_id) == (1, (2,), 2)


def test_attention_biases_of_a_llama_are_reordered_too(tmp_path: Path) -> None:
    biases = {"attn_q": 128, "attn_k": 64, "attn_v": 64, "attn_output": 128}
    values = {part: np.arange(size, dtype=np.float32) for part, size in biases.items()}

    def add(tensors: Tensors) -> None:
        for part, vector in values.items():
            heads = {"attn_q": 2, "attn_k": 1}.get(part)
            tensors[f"blk.0.{part}.bias"] = reorder_rows(vector, heads) if heads else vector

    with open_source(str(write_gguf(tmp_path / "model.gguf", SHAPE, change=add))) as source:
        assert source.check() == []
        assert source.spec.qkv_bias and source.spec.o_bias
        for part, vector in values.items():
            name = hugging_face_name(f"blk.0.{part}.bias")
            assert torch.equal(source.load(name), torch.from_numpy(vector))
            assert torch.equal(source.load_rows(name, 10, 40), torch.from_numpy(vector[10:40]))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *SIMPLE_TYPES, *K_TYPES])
def test_every_type_agrees_with_the_gguf_package(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "model.gguf", WIDE, matrix_type=kind)
    theirs = {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(path).tensors}
    monkeypatch.setattr("fut_convert.sources.gguf_file._CHUNK_ELEMENTS", 1000)
    with open_source(str(path)) as source:
        assert source.check() == []
        assert source.dtype == kind
        for name, info in source.tensors.items():
            expected = torch.from_numpy(theirs[gguf_name(name)].astype(np.float32))
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                expected = restore_head_rows(expected, WIDE.head_dim)
            loaded = source.load(name)
            if len(info.shape) == 2:
                assert info.dtype == kind
                assert loaded.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
            assert torch.equal(loaded.float(), expected), name
            for start, stop in ((0, 1), (5, 70), (63, 65), (100, 128)):
                rows = source.load_rows(name, start, min(stop, info.shape[0]))
                assert torch.equal(rows.float(), expected[start:stop]), (name, start, stop)


@given(st.integers(1, 5), st.sampled_from([64, 80, 96, 128]))
def test_restoring_rows_undoes_reordering(heads: int, head_dim: int) -> None:
    rows = np.arange(heads * head_dim * 2, dtype=np.float32).reshape(-1, 2)
    reordered = torch.from_numpy(reorder_rows(rows, heads))
    assert torch.equal(restore_head_rows(reordered, head_dim), torch.from_numpy(rows))


def test_header_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    extra = {"a.list": [1, 2, 3], "a.words": ["x", "yé"], "a.flag": True, "a.float": 0.1, "general.alignment": 64}
    path = write_gguf(tmp_path / "model.gguf", SHAPE, matrix_type="Q8_0", metadata=extra)
    ours, theirs = GGUFFile(path), GGUFReader(path)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    assert {name: (t.offset, t.nbytes, t.type) for name, t in ours.tensors.items()} == {
        t.name: (t.data_offset, t.n_bytes, t.tensor_type.name) for t in theirs.tensors
    }
    ours.close()


def test_config_files_describe_the_same_model(tmp_path: Path) -> None:
    with open_source(str(write_gguf(tmp_path / "model.gguf", SHAPE))) as source:
        files = dict(source.side_files())
        spec = source.spec
    assert sorted(files) == ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    config, generation = (json.loads(files[f"{n}.json"]) for n in ("config", "generation_config"))  # type: ignore[arg-type]
    assert model_spec(config, generation, "again") == spec
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaConfig(**config)
    assert (theirs.head_dim, theirs.num_key_value_heads) == (spec.head_dim, spec.num_kv_heads)
    assert (theirs.rms_norm_eps, theirs.tie_word_embeddings) == (1e-5, False)


@pytest.mark.parametrize("value", [1e-5, 1e-6, 10000.0, 5e5, 1e6, 8.0, 0.1])
def test_stored_floats_are_the_decimals_they_were(value: float) -> None:
    assert shortest_decimal(float(np.float32(value))) == value


# --- RoPE -----------------------------------------------------------------------------------------------------------


def spec_with(tmp_path: Path, metadata: dict[str, Any], factors: list[float] | None = None) -> RopeSpec:
    def add(tensors: Tensors) -> None:
        if factors is not None:
            tensors["rope_freqs.weight"] = np.array(factors, dtype=np.float32)

    with open_source(str(write_gguf(tmp_path / "model.gguf", SHAPE, metadata=metadata, change=add))) as source:
        assert source.check() == []
        return source.spec.rope


@pytest.mark.parametrize(
    ("theta", "factor", "low", "high", "original"),
    [(5e5, 8.0, 1.0, 4.0, 8192), (5e5, 32.0, 1.0, 4.0, 8192), (5e5, 8.0, 1.0, 4.0, 64), (1e4, 4.0, 1.0, 8.0, 512)],
)
def test_llama3_scaling_is_recovered(
    tmp_path: Path, theta: float, factor: float, low: float, high: float, original: int
) -> None:
    factors = llama3_factors(factor, low, high, original, theta, 64)
    rope = spec_with(tmp_path, {"llama.rope.freq_base": theta}, factors)
    assert rope == RopeSpec(
        "llama3",
        theta,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )


def test_llama3_factors_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    utilities = pytest.importorskip("transformers.modeling_rope_utils")
    section = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, rope_theta=5e5, rope_scaling=section
    )
    scaled, _ = utilities.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 5e5 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    ours = llama3_factors(8.0, 1.0, 4.0, 64, 5e5, 64)
    assert torch.allclose(plain / scaled.double(), torch.tensor(ours, dtype=torch.float64), rtol=1e-5)


@given(st.floats(2, 64), st.floats(2, 16), st.integers(64, 16384), st.sampled_from([1e4, 1e5, 5e5, 1e6]))
def test_recovered_scaling_has_the_same_factors(factor: float, high: float, original: int, theta: float) -> None:
    factors = [float(np.float32(f)) for f in llama3_factors(factor, 1.0, high, original, theta, 128)]
    try:
        found = llama3_scaling(factors, theta, 128, "x")
    except UnsupportedModelError:
        # A ramp that meets fewer than two frequencies, or parameters that are not round, may be refused.
        return
    again = llama3_factors(
        found["factor"], found["low_freq_factor"], found["high_freq_factor"],
        found["original_max_position_embeddings"], theta, 128,
    )  # fmt: skip
    assert np.allclose(again, factors, rtol=1e-4)


def test_factors_of_one_are_no_scaling(tmp_path: Path) -> None:
    assert spec_with(tmp_path, {}, [1.0] * 32) == RopeSpec()


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, RopeSpec()),
        ({"llama.rope.freq_base": 1e6}, RopeSpec(theta=1e6)),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, RopeSpec()),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5},
            RopeSpec("linear", factor=2.5),
        ),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}, RopeSpec()),
        ({"llama.rope.scale_linear": 2.0}, RopeSpec("linear", factor=2.0)),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 512,
                "llama.rope.scaling.attn_factor": 1.0,
            },
            RopeSpec("yarn", factor=4.0, original_max_position_embeddings=512),
        ),
    ],
)
def test_named_scalings(tmp_path: Path, metadata: dict[str, Any], expected: RopeSpec) -> None:
    assert spec_with(tmp_path, metadata) == expected


@pytest.mark.parametrize(
    ("metadata", "factors", "error", "reason"),
    [
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, None, ConvertError, "longrope"),
        ({"llama.rope.scaling.type": "linear"}, None, CheckpointError, "factor is missing"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.attn_factor": 0.7,
            },
            None,
            UnsupportedModelError,
            "attn_factor is 0.7",
        ),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            [8.0] * 32,
            UnsupportedModelError,
            "together with rope_freqs.weight",
        ),
        ({}, [1.0 + i for i in range(32)], UnsupportedModelError, "not a Llama 3 scaling"),
        ({}, [2.0] * 16, CheckpointError, "16 values, expected 32"),
    ],
)
def test_scaling_without_counterpart_is_refused(
    tmp_path: Path, metadata: dict[str, Any], factors: list[float] | None, error: type[ConvertError], reason: str
) -> None:
    with pytest.raises(error) as caught:
        spec_with(tmp_path, metadata, factors)
    assert reason in str(caught.value)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "error", "reason"),
    [
        ({"general.architecture": "gemma3"}, UnsupportedModelError, "'gemma3' is not supported"),
        ({"general.type": "adapter"}, UnsupportedModelError, "'adapter', not a model"),
        ({"llama.expert_count": 8}, UnsupportedModelError, "mixtures of experts"),
        ({"llama.attention.sliding_window": 128}, UnsupportedModelError, "sliding window of 128"),
        ({"llama.attention.clamp_kqv": 8.0}, UnsupportedModelError, "clamped"),
        ({"llama.logit_scale": 0.5}, UnsupportedModelError, "logit scales"),
        ({"llama.attention.value_length": 32}, UnsupportedModelError, "different sizes"),
        ({"llama.rope.dimension_count": 32}, UnsupportedModelError, "only 32 of 64"),
        ({"llama.feed_forward_length": [192, 96]}, UnsupportedModelError, "differs by layer"),
        ({"llama.block_count": ...}, CheckpointError, "llama.block_count is missing"),
        ({"llama.attention.head_count": "two"}, CheckpointError, "expected a positive integer"),
        ({"llama.attention.layer_norm_rms_epsilon": ...}, CheckpointError, "layer_norm_rms_epsilon is None"),
        ({"llama.attention.key_length": 48, "llama.attention.value_length": 48,
          "llama.rope.dimension_count": 48}, UnsupportedModelError, "heads of 48"),
        ({"tokenizer.ggml.tokens": ...}, CheckpointError, "holds no tokenizer"),
    ],
)  # fmt: skip
def test_unsupported_model_is_refused(
    tmp_path: Path, metadata: dict[str, Any], error: type[ConvertError], reason: str
) -> None:
    path = write_gguf(tmp_path / "model.gguf", SHAPE, metadata=metadata)
    with pytest.raises(error, match=r"model\.gguf") as caught:
        open_source(str(path))
    assert reason in str(caught.value)


def test_size_given_once_a_layer_is_accepted(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", SHAPE, metadata={"llama.feed_forward_length": [192, 192]})
    with open_source(str(path)) as source:
        assert source.spec.intermediate_size == 192


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["blk.0.ffn_gate_inp.weight"] = tensors.pop("blk.0.ffn_up.weight")

    with open_source(str(write_gguf(tmp_path / "model.gguf", SHAPE, change=change))) as source:
        found = [str(problem) for problem in source.check()]
    assert any("model.layers.0.mlp.up_proj.weight [192, 128] is missing" in text for text in found)
    assert any("blk.0.ffn_gate_inp.weight [192, 128] has no place" in text for text in found)


def test_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", WIDE, matrix_type="TQ1_0")
    with open_source(str(path)) as source:
        found = [str(p) for p in source.check() if p.severity == "error"]
        assert any(f"{Q} is stored as TQ1_0; readable are BF16, F16, F32, Q2_K" in text for text in found)
        with pytest.raises(CheckpointError, match="stored as TQ1_0"):
            source.load(Q)


def test_embedding_is_missing(tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> None:
        del tensors["token_embd.weight"]

    path = write_gguf(tmp_path / "model.gguf", SHAPE, change=drop)
    with pytest.raises(CheckpointError, match=r"token_embd\.weight is missing"):
        open_source(str(path))


def test_more_tokens_than_rows_and_fewer(tmp_path: Path) -> None:
    def cut(tensors: Tensors) -> None:
        tensors["token_embd.weight"] = tensors["token_embd.weight"][:380]
        tensors["output.weight"] = tensors["output.weight"][:380]

    def stretch(tensors: Tensors) -> None:
        tensors["token_embd.weight"] = np.ones((400, 128), dtype=np.float32)
        tensors["output.weight"] = np.ones((400, 128), dtype=np.float32)

    for change, severity in ((cut, "error"), (stretch, "warning")):
        with open_source(str(write_gguf(tmp_path / "model.gguf", SHAPE, change=change))) as source:
            (problem,) = source.check()
            assert problem.severity == severity
            assert "384 tokens for an embedding of" in str(problem)


# --- damaged files --------------------------------------------------------------------------------------------------


def test_truncated_file_is_found_before_any_work(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", SHAPE)
    size = path.stat().st_size
    os.truncate(path, size - 5000)
    with open_source(str(path)) as source:
        (problem,) = source.check()
        assert str(problem).startswith(f"model.gguf: truncated, has {size - 5000} bytes where its tensors need")
        with pytest.raises(CheckpointError, match="ends inside"):
            for name in source.tensors:
                source.load(name)
    os.truncate(path, 2000)
    with pytest.raises(CheckpointError, match="ends within its header"):
        open_source(str(path))


def test_value_that_is_not_finite(tmp_path: Path) -> None:
    def damage(tensors: Tensors) -> None:
        tensors["blk.0.ffn_up.weight"][3, 3] = math.nan

    with (
        open_source(str(write_gguf(tmp_path / "model.gguf", SHAPE, change=damage))) as source,
        pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight holds 1 values that are not finite"),
    ):
        source.load("model.layers.0.mlp.up_proj.weight")


def _gguf(version: int = 3, tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (b"GGML", "not a GGUF file"),
        (b"", "not a GGUF file"),
        (_gguf(version=1), "version 1 is not supported"),
        (_gguf(version=3 << 24), "big-endian"),
        (_gguf(keys=1, rest=struct.pack("<Q", 1 << 60)), "ends within its header"),
        (_gguf(keys=1, rest=_text(b"k") + struct.pack("<I", 99)), "unknown type 99"),
        (_gguf(keys=1, rest=_text(b"\xff\xfe")), "cannot be parsed"),
        (_gguf(tensors=1, rest=_text(b"t") + struct.pack("<I", 9)), "9 dimensions"),
        (_gguf(tensors=1, rest=_text(b"t") + struct.pack("<IQIQ", 1, 32, 999, 0)), "type 999"),
        (_gguf(tensors=1, rest=_text(b"t") + struct.pack("<IQIQ", 1, 33, 2, 0)), "whole Q4_0 blocks"),
        (_gguf(tensors=2, rest=(_text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0)) * 2), "listed twice"),
    ],
)
def test_unreadable_header(tmp_path: Path, contents: bytes, reason: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(contents)
    with pytest.raises(CheckpointError, match=r"model\.gguf") as caught:
        open_source(str(path))
    assert reason in str(caught.value)


# --- parts ----------------------------------------------------------------------------------------------------------


def split_model(tmp_path: Path) -> list[Path]:
    names = list(stored_tensors(SHAPE))
    paths = []
    for part in (0, 1):

        def keep_half(tensors: Tensors, first: int = part) -> None:
            for name in names[1 - first :: 2]:
                del tensors[name]

        path = tmp_path / f"model-{part + 1:05d}-of-00002.gguf"
        paths.append(write_gguf(path, SHAPE, metadata={"split.no": part, "split.count": 2}, change=keep_half))
    return paths


def test_model_in_parts_is_read_whole_from_any_of_them(tmp_path: Path) -> None:
    for path in split_model(tmp_path):
        with open_source(str(path)) as source:
            assert source.check() == []
            for name, values in float_tensors(SHAPE).items():
                assert torch.equal(source.load(name), torch.from_numpy(values))


def test_missing_or_renamed_part_is_named(tmp_path: Path) -> None:
    first, second = split_model(tmp_path)
    renamed = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"its part model-00001-of-00002\.gguf is missing"):
        GGUFSource(second)
    with pytest.raises(CheckpointError, match="one of 2 parts"):
        GGUFSource(renamed)


# --- the real model -------------------------------------------------------------------------------------------------


def test_smollm2_weights_are_those_of_the_gguf_package(smollm2_gguf: Path) -> None:
    """Against the package's own reader; q and k with the un-permutation as make-by-hand indexing."""
    theirs = {t.name: t for t in GGUFReader(smollm2_gguf).tensors}
    with open_source(str(smollm2_gguf)) as source:
        assert source.check() == []
        assert source.spec.rms_norm_eps == 1e-5
        assert source.spec.tie_word_embeddings
        assert source.identity["license"] == "apache-2.0"
        assert len(source.tensors) == len(theirs) == 272
        for name in source.tensors:
            if ".layers." in name and not any(f".layers.{layer}." in name for layer in (0, 17, 29)):
                continue
            tensor = theirs[gguf_name(name)]
            expected = dequantize(tensor.data, tensor.tensor_type)
            if ".q_proj." in name or ".k_proj." in name:
                order = [h * 64 + 2 * (i % 32) + i // 32 for h in range(len(expected) // 64) for i in range(64)]
                expected = expected[order]
            assert np.array_equal(source.load(name).numpy(), expected), name
