"""GGUF models: weights, config and refusals, with the gguf package's reader as the independent opinion."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from gguf_models import Tensors, float_tensors, gguf_name, reorder_rows, write_gguf
from hypothesis import given
from hypothesis import strategies as st

from fut_convert.sources import open_source
from fut_convert.sources.config import model_spec
from fut_convert.sources.gguf_file import GGUFFile, shortest_decimal
from fut_convert.sources.gguf_source import hugging_face_name, restore_head_rows
from synthetic_checkpoint import CheckpointShape

SHAPE = CheckpointShape(layers=1)
WIDE = CheckpointShape(layers=1, hidden=256, heads=4, kv_heads=2, intermediate=512)
EMBEDDING = "model.embed_tokens.weight"
Q = "model.layers.0.self_attn.q_proj.weight"

SIMPLE_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
IQ_TYPES = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS")


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


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *SIMPLE_TYPES, *K_TYPES, *IQ_TYPES])
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
