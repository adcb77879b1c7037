"""Tokenizer files, BOS rules and special tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fut_runtime.tokenizer import Tokenizer, TokenizerError
from small_tokenizers import CHATML, byte_level, byte_level_raw, sentencepiece, sentencepiece_raw


def test_bos_comes_from_the_post_processor_unless_the_config_says_otherwise() -> None:
    bos = 1
    assert sentencepiece().encode("hello")[0] == bos
    assert sentencepiece(add_bos_token=False).encode("hello")[0] != bos
    tokenizer = byte_level()
    assert tokenizer.encode("hello") == tokenizer.encode("hello", add_special_tokens=False)
    with_bos = byte_level(add_bos_token=True)
    assert with_bos.encode("hello") == [with_bos.bos_token_id, *tokenizer.encode("hello")]
    assert Tokenizer(sentencepiece_raw(), {}).encode("") == [bos]


def test_a_bos_spelled_in_the_text_is_not_doubled() -> None:
    tokenizer = sentencepiece()
    assert tokenizer.encode("<s>hello").count(1) == 1
    assert tokenizer.encode("<s><s>hello").count(1) == 2


def test_the_files_of_a_directory(tmp_path: Path) -> None:
    byte_level_raw().save(str(tmp_path / "tokenizer.json"))
    special = {"bos_token": {"content": "<|im_start|>", "lstrip": False}, "eos_token": "<|im_end|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "from config"}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.eos_token_id == tokenizer.token_id("<|im_end|>")
    assert tokenizer.bos_token_id == tokenizer.token_id("<|im_start|>")
    assert tokenizer.chat_template is not None and tokenizer.chat_template.source == "from config"
    (tmp_path / "chat_template.jinja").write_text("from file")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.chat_template is not None and tokenizer.chat_template.source == "from file"


def test_a_list_of_templates_means_the_default_one() -> None:
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    tokenizer = Tokenizer(byte_level_raw(), {"chat_template": named})
    assert tokenizer.chat_template is not None and tokenizer.chat_template.source == "d"
    assert Tokenizer(byte_level_raw(), {"chat_template": named[:1]}).chat_template is None


def test_a_tokenizer_saved_with_truncation_does_not_cut_prompts(tmp_path: Path) -> None:
    raw = byte_level_raw()
    raw.enable_truncation(2)
    raw.enable_padding(length=8)
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: the tokenizers library"):
        Tokenizer.from_directory(tmp_path)
    byte_level_raw().save(str(tmp_path / "tokenizer.json"))
    broken = {
        "{": "not valid",
        "[" * 100_000: "not valid",
        "[]": "a JSON object",
        '{"bos_token": "\\ud800"}': "surrogate",
        '{"chat_template": 3}': "int",
    }
    for content, message in broken.items():
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(TokenizerError, match=message):
            Tokenizer.from_directory(tmp_path)


def test_files_that_the_library_panics_at(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    byte_level_raw().save(str(file))
    whole = json.loads(file.read_text())
    file.write_text(json.dumps({**whole, "model": {**whole["model"], "continuing_subword_prefix": "none"}}))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: the tokenizers library cannot read it \(range end"):
        Tokenizer.from_directory(tmp_path)
    file.write_text(json.dumps({**whole, "normalizer": [""]}))
    with pytest.raises(TokenizerError, match="cannot encode the text; its tokenizer"):
        Tokenizer.from_directory(tmp_path).encode("Once")


def test_without_a_template_there_is_no_conversation() -> None:
    with pytest.raises(TokenizerError, match="no chat template"):
        byte_level(chat_template=None).encode_chat([{"role": "user", "content": "hello"}])


def test_a_rendered_template_keeps_its_one_bos() -> None:
    tokenizer = sentencepiece("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    assert tokenizer.encode_chat([{"role": "user", "content": "hello"}]).count(1) == 1
    tokenizer = byte_level(CHATML, add_bos_token=True)
    ids = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert ids[0] == tokenizer.bos_token_id != ids[1]


def test_smollm2_adds_nothing_and_ends_at_im_end(smollm2_dir: Path) -> None:
    tokenizer = Tokenizer.from_directory(smollm2_dir)
    assert tokenizer.decode(tokenizer.encode("Hello 2024, wörld 😀")) == "Hello 2024, wörld 😀"
    assert tokenizer.encode("Hello")[0] != tokenizer.bos_token_id
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert [i for i in ids if i in tokenizer.special_ids] == [1, 2, 1, 2, 1]
    assert tokenizer.piece(2) == "<|im_end|>"
