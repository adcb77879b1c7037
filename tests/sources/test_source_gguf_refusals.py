"""GGUF files that are refused, damaged or in parts."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_models import Tensors, float_tensors, stored_tensors, write_gguf

from fut_convert.errors import CheckpointError, ConvertError, UnsupportedModelError
from fut_convert.sources import open_source
from fut_convert.sources.gguf_file import GGUFFile
from fut_convert.sources.gguf_source import GGUFSource
from fuzzing.gguf_bytes import nested_arrays
from synthetic_checkpoint import CheckpointShape

SHAPE = CheckpointShape(layers=1)
WIDE = CheckpointShape(layers=1, hidden=256, heads=4, kv_heads=2, intermediate=512)
Q = "model.layers.0.self_attn.q_proj.weight"


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
        ({"tokenizer.ggml.tokens": 7}, CheckpointError, "tokens is 7, expected an array of texts"),
        ({"tokenizer.ggml.merges": [1, 2]}, CheckpointError, "merges is [1, 2], expected an array of texts"),
        ({"tokenizer.ggml.token_type": 1}, CheckpointError, "token_type is 1, expected an array of whole numbers"),
        ({"tokenizer.ggml.scores": [math.nan]}, CheckpointError, "scores is [nan], expected an array of finite"),
        ({"tokenizer.ggml.bos_token_id": "1"}, CheckpointError, "bos_token_id is '1', expected a whole number"),
        ({"tokenizer.ggml.add_bos_token": "yes"}, CheckpointError, "add_bos_token is 'yes', expected true or false"),
        ({"tokenizer.ggml.pre": ["gpt-2"]}, CheckpointError, "pre is ['gpt-2'], expected a text"),
        ({"tokenizer.chat_template": 3}, CheckpointError, "chat_template is 3, expected a text"),
        ({"llama.rope.freq_base": [1.0]}, CheckpointError, "freq_base is [1.0], expected a finite number"),
        ({"llama.rope.scaling.factor": "2"}, CheckpointError, "factor is '2', expected a finite number"),
        ({"llama.context_length": "x"}, CheckpointError, "context_length is 'x'"),
        ({"llama.attention.head_count": [2.0, 2.0]}, CheckpointError, "head_count is [2.0, 2.0]"),
        ({"split.count": [2]}, CheckpointError, "split.count is [2], expected a whole number"),
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
        assert any(f"{Q} is stored as TQ1_0; readable are BF16, F16, F32, IQ1_M" in text for text in found)
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
        (_gguf(tensors=1, rest=_text(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0)), "has shape [0]"),
        (nested_arrays(50_000), "arrays are nested more than 8 deep"),
        (_gguf(tensors=2, rest=(_text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0)) * 2), "listed twice"),
    ],
)
def test_unreadable_header(tmp_path: Path, contents: bytes, reason: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(contents)
    with pytest.raises(CheckpointError, match=r"model\.gguf") as caught:
        open_source(str(path))
    assert reason in str(caught.value)


def test_header_longer_than_any_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fut_convert.sources.gguf_file._MAX_HEADER_BYTES", 5000)
    path = write_gguf(tmp_path / "model.gguf", SHAPE)
    with pytest.raises(CheckpointError, match="it has more than 5000 bytes"):
        open_source(str(path))


@pytest.mark.parametrize(
    ("factors", "reason"),
    [
        (np.ones((2, 16), dtype=np.float32), r"rope_freqs\.weight has shape \[2, 16\], expected \[head_dim / 2\]"),
        (np.full(32, np.nan, dtype=np.float32), "holds a factor that is not a positive number"),
        (np.zeros(32, dtype=np.float32), "holds a factor that is not a positive number"),
        (np.ones(5000, dtype=np.float32), r"has shape \[5000\]"),
    ],
)
def test_rope_factors_that_are_none(tmp_path: Path, factors: np.ndarray[Any, Any], reason: str) -> None:
    def add(tensors: Tensors) -> None:
        tensors["rope_freqs.weight"] = factors

    with pytest.raises(CheckpointError, match=reason):
        open_source(str(write_gguf(tmp_path / "model.gguf", SHAPE, change=add)))


def test_no_memory_is_taken_for_what_the_file_does_not_hold(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(_gguf(tensors=1, rest=_text(b"t") + struct.pack("<IQIQ", 1, 1 << 50, 0, 0)))
    file = GGUFFile(path)
    with pytest.raises(CheckpointError, match="ends inside t"):
        file.read_rows(file.tensors["t"], 0, 1 << 50)
    file.close()


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
            # An interrupted conversion that goes on must notice a change of any part.
            sizes = {part.name: part.stat().st_size for part in tmp_path.glob("*.gguf")}
            assert {name: stamp[0] for name, stamp in source.file_stamps().items()} == sizes


def test_missing_or_renamed_part_is_named(tmp_path: Path) -> None:
    first, second = split_model(tmp_path)
    renamed = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"its part model-00001-of-00002\.gguf is missing"):
        GGUFSource(second)
    with pytest.raises(CheckpointError, match="one of 2 parts"):
        GGUFSource(renamed)
