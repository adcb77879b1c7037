"""Tokenizers rebuilt from GGUF files, against slow and plain encoders of the same vocabularies."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from gguf_models import byte_level_metadata, model_metadata, rebuild, sentencepiece_metadata, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_tokenizers import SLOW_SPLITS, TEXTS, WHOLE_WORDS, slow_bpe
from tokenizers import Tokenizer, decoders, pre_tokenizers

from fut_convert.errors import CheckpointError, ConvertError, UnsupportedModelError
from fut_convert.sources import open_source
from fut_convert.sources.gguf_bpe import SPLITS
from fut_convert.sources.gguf_config import hugging_face_config
from fut_convert.sources.gguf_tokenizer import tokenizer_files
from synthetic_checkpoint import CHAT_TEMPLATE, CheckpointShape

# --- byte-level BPE -------------------------------------------------------------------------------------------------


def plain_metadata(pre: str) -> dict[str, Any]:
    """A vocabulary with one token no merge makes, which only the whole-word rule can give."""
    metadata = {**byte_level_metadata(768, pre), "tokenizer.ggml.add_bos_token": False}
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "Ġzqxj"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    return metadata


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_byte_level_agrees_with_the_slow_encoder(pre: str) -> None:
    metadata = plain_metadata(pre)
    tokenizer, _ = rebuild(metadata)
    for text in (*TEXTS, "a zqxj b"):
        if "<|" in text:
            continue
        expected = slow_bpe(text, metadata, SLOW_SPLITS[pre], whole_words=pre in WHOLE_WORDS)
        assert tokenizer.encode(text).ids == expected, text
        if pre != "qwen2":
            assert tokenizer.decode(expected) == text


@settings(max_examples=60)
@given(st.sampled_from(sorted(set(SPLITS) - {"default", "llama3", "llama-v3"})), st.text(max_size=40))
def test_byte_level_agrees_on_any_text(pre: str, text: str) -> None:
    # The slow splitter's Unicode tables may be newer than the library's.
    if any(unicodedata.category(c) == "Cn" for c in text):
        return
    metadata = plain_metadata(pre)
    expected = slow_bpe(text, metadata, SLOW_SPLITS[pre], whole_words=pre in WHOLE_WORDS)
    assert rebuild(metadata)[0].encode(text).ids == expected


def test_special_tokens_stay_whole() -> None:
    metadata = byte_level_metadata()
    tokenizer, config = rebuild(metadata)
    start, end = 1, 2
    ids = tokenizer.encode("<|im_start|>user<|im_end|><|im_end|>").ids
    assert (ids[0], ids[-2:]) == (start, [end, end])
    assert tokenizer.decode(ids) == "user"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user<|im_end|><|im_end|>"
    assert {i: entry["content"] for i, entry in config["added_tokens_decoder"].items()} == {
        "0": "<|endoftext|>",
        "1": "<|im_start|>",
        "2": "<|im_end|>",
    }
    assert all(entry["special"] for entry in config["added_tokens_decoder"].values())


def test_user_defined_tokens_stay_whole_but_are_shown() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<think>", "[PAD385]", "[PAD386]"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4, 5, 5]
    tokenizer, config = rebuild(metadata)
    assert tokenizer.encode("<think>").ids == [384]
    assert tokenizer.decode([384]) == "<think>"
    assert config["added_tokens_decoder"]["384"]["special"] is False
    assert tokenizer.id_to_token(385) is None
    assert 385 not in tokenizer.encode("[PAD385]").ids


@pytest.mark.parametrize(
    ("pre", "flags", "expected"),
    [
        ("gpt-2", {}, (False, False)),
        ("llama-bpe", {}, (True, False)),
        ("tekken", {}, (True, False)),
        ("llama-bpe", {"add_bos_token": False}, (False, False)),
        ("smollm", {"add_bos_token": True}, (True, False)),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, (True, True)),
        ("qwen2", {"add_eos_token": True}, (False, True)),
    ],
)
def test_begin_and_end_tokens(pre: str, flags: dict[str, bool], expected: tuple[bool, bool]) -> None:
    metadata = {**byte_level_metadata(pre=pre), **{f"tokenizer.ggml.{key}": value for key, value in flags.items()}}
    tokenizer, config = rebuild(metadata)
    plain = tokenizer.encode("some text", add_special_tokens=False).ids
    begin, end = ([1] if expected[0] else []), ([2] if expected[1] else [])
    assert tokenizer.encode("some text").ids == begin + plain + end
    assert tokenizer.encode("some text", "some text").ids == begin + plain + end + begin + plain + end
    assert (config["add_bos_token"], config["add_eos_token"]) == expected


def test_settings_and_templates() -> None:
    metadata = byte_level_metadata()
    metadata |= {"tokenizer.chat_template.rag": "{{ documents }}", "tokenizer.chat_template.../evil": "x"}
    files = tokenizer_files(metadata, 512, "some.gguf")
    config = json.loads(files["tokenizer_config.json"])
    assert config["chat_template"] == CHAT_TEMPLATE
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert config["model_max_length"] == 512
    assert config["clean_up_tokenization_spaces"] is False
    assert sorted(files) == ["additional_chat_templates/rag.jinja", "tokenizer.json", "tokenizer_config.json"]


def _changed(**changes: Any) -> dict[str, Any]:
    values = byte_level_metadata() | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in values.items() if value is not ...}


@pytest.mark.parametrize(
    ("metadata", "error", "reason"),
    [
        (_changed(pre="deepseek-llm"), UnsupportedModelError, "pre-tokenizer 'deepseek-llm' is not supported"),
        (_changed(pre=...), UnsupportedModelError, "no tokenizer.ggml.pre"),
        (_changed(model="bert"), UnsupportedModelError, "tokenizer model 'bert'"),
        (_changed(merges=...), CheckpointError, "merges is missing"),
        (_changed(merges=["nothing"]), CheckpointError, "'nothing', expected two tokens"),
        (_changed(merges=["absent tokens"]), CheckpointError, "do not fit together"),
        (_changed(tokens=["a", "b", "a"], token_type=[1, 1, 1]), CheckpointError, "holds 'a' twice"),
        (_changed(token_type=[1]), CheckpointError, "1 token types for 384 tokens"),
        (_changed(tokens=...), CheckpointError, "holds no tokenizer"),
    ],
)
def test_tokenizer_that_cannot_be_rebuilt(metadata: dict[str, Any], error: type[ConvertError], reason: str) -> None:
    with pytest.raises(error, match=r"some\.gguf") as caught:
        rebuild(metadata)
    assert reason in str(caught.value)


# --- ends of a text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 2),
        ({"eot_token_id": 0}, [2, 0]),
        ({"eot_token_id": 0, "eom_token_id": 5}, [2, 0, 5]),
        ({"eos_token_id": 0}, [0, 2]),  # the chat template ends its turns with token 2
        ({"eos_token_id": 9999}, 2),
    ],
)
def test_every_token_that_ends_a_text(changes: dict[str, int], expected: int | list[int]) -> None:
    metadata = {
        "general.architecture": "llama",
        **model_metadata(CheckpointShape()),
        **byte_level_metadata(),
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }
    config, generation = hugging_face_config(metadata, {"model.embed_tokens.weight": (384, 128)}, None, "x")
    assert config["eos_token_id"] == generation["eos_token_id"] == expected


# --- whole files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_transformers_reads_the_same_tokenizer(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    metadata = byte_level_metadata(pre="llama-bpe") if kind == "byte level" else sentencepiece_metadata()
    for name, contents in tokenizer_files(metadata, 2048, "some.gguf").items():
        (tmp_path / name).write_bytes(contents)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours, _ = rebuild(metadata)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours.encode(text).ids, text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)
    if kind == "byte level":
        prompt = theirs.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
        assert prompt == "<|im_start|>user\nHi<|im_end|>\n"


def test_tokenizer_of_a_model_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", CheckpointShape(layers=1))
    with open_source(str(path)) as source:
        files = dict(source.side_files())
    tokenizer, _ = rebuild(byte_level_metadata())
    assert Tokenizer.from_str(files["tokenizer.json"].decode()).to_str() == tokenizer.to_str()  # type: ignore[union-attr]


def test_smollm2_tokenizer_is_the_published_one(smollm2_gguf: Path) -> None:
    """Ids recorded from a tokenizer put together by hand as HuggingFaceTB publishes it."""
    with open_source(str(smollm2_gguf)) as source:
        files = dict(source.side_files())
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())  # type: ignore[union-attr]
    assert tokenizer.get_vocab_size() == 49152
    assert tokenizer.encode("In 2000, 12 cats  sat.").tokens == [
        "In", "Ġ", "2", "0", "0", "0", ",", "Ġ", "1", "2", "Ġcats", "Ġ", "Ġsat", ".",
    ]  # fmt: skip
    assert tokenizer.encode("hello").ids == [28120]
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    assert (
        hashlib.sha256(json.dumps(ids).encode()).hexdigest()
        == "9e64e99e9285b61f16f4848c4b02f0b5d51a6bd095960a11672a8610d5e389e8"
    )
    assert isinstance(tokenizer.decoder, decoders.ByteLevel)
    assert isinstance(tokenizer.pre_tokenizer, pre_tokenizers.Sequence)
    config = json.loads(files["tokenizer_config.json"])  # type: ignore[arg-type]
    assert (config["bos_token"], config["eos_token"], config["pad_token"], config["unk_token"]) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert config["add_bos_token"] is False
    assert config["clean_up_tokenization_spaces"] is False
    assert "SmolLM" in config["chat_template"]
    assert len(config["added_tokens_decoder"]) == 17
    assert json.loads(files["generation_config.json"]) == {  # type: ignore[arg-type]
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
