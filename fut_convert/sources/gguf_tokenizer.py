"""The tokenizer of a GGUF file, rebuilt as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from fut_convert.errors import CheckpointError, UnsupportedModelError
from fut_convert.sources.gguf_bpe import byte_level_tokenizer, split_of
from fut_convert.sources.gguf_config import special_token_ids
from fut_convert.sources.gguf_spm import sentencepiece_tokenizer

_PREFIX = "tokenizer.ggml."

#: What converters fill the vocabulary up with, to as many tokens as the embedding has rows.
_PADDING_TOKEN = re.compile(r"\[PAD\d+\]")


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_files(metadata: Mapping[str, Any], context_length: int, where: str) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and further chat templates, by file name.

    Raises:
        UnsupportedModelError: a kind of tokenizer, or a way to split text, that is not known here.
        CheckpointError: the vocabulary is missing or contradicts itself.
    """
    tokens = metadata.get(f"{_PREFIX}tokens")
    if not tokens:
        raise CheckpointError(f"{where}: holds no tokenizer (tokenizer.ggml.tokens is missing)")
    types = _token_types(metadata, len(tokens), where)
    used = [
        i for i, token in enumerate(tokens) if not (types[i] == TokenType.UNUSED and _PADDING_TOKEN.fullmatch(token))
    ]
    vocab = {tokens[i]: i for i in reversed(used)}
    if len(vocab) != len(used):
        twice = next(tokens[i] for i in used if vocab[tokens[i]] != i)
        raise CheckpointError(f"{where}: the vocabulary holds {twice!r} twice")
    ids = special_token_ids(metadata)
    special = {i for i in used if types[i] in (TokenType.CONTROL, TokenType.UNKNOWN)} | set(ids.values())

    kind = metadata.get(f"{_PREFIX}model")
    if kind == "gpt2":
        split = split_of(metadata.get(f"{_PREFIX}pre"), where)
        merges = metadata.get(f"{_PREFIX}merges")
        if merges is None:
            raise CheckpointError(f"{where}: tokenizer.ggml.merges is missing")
        tokenizer = byte_level_tokenizer(vocab, merges, split, where)
        space_prefix, add_bos = False, split.add_bos
    elif kind == "llama":
        space_prefix, add_bos = bool(metadata.get(f"{_PREFIX}add_space_prefix", True)), True
        tokenizer = _sentencepiece(metadata, tokens, types, vocab, space_prefix, where)
    else:
        raise UnsupportedModelError(f"{where}: tokenizer model {kind!r} is not supported; supported are gpt2 and llama")

    added = {i: i in special for i in used if i in special or types[i] == TokenType.USER_DEFINED}
    # Each stays one token whatever surrounds it; only special ones are left out when text is shown.
    tokenizer.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in added if added[i]])
    tokenizer.add_tokens([AddedToken(tokens[i], normalized=False) for i in added if not added[i]])
    begin = ids.get("bos_token_id") if metadata.get(f"{_PREFIX}add_bos_token", add_bos) else None
    end = ids.get("eos_token_id") if metadata.get(f"{_PREFIX}add_eos_token", False) else None
    _add_ends(tokenizer, tokens, begin, end)
    config = {
        "add_bos_token": begin is not None,
        "add_eos_token": end is not None,
        "add_prefix_space": space_prefix,
        "added_tokens_decoder": {str(i): _added_token(tokens[i], added[i]) for i in sorted(added)},
        **_named_tokens(tokens, ids),
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    files = {
        "tokenizer.json": (tokenizer.to_str(pretty=True) + "\n").encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(),
    }
    return files | _further_templates(metadata)


def _token_types(metadata: Mapping[str, Any], count: int, where: str) -> list[int]:
    types = metadata.get(f"{_PREFIX}token_type")
    if types is None:
        return [TokenType.NORMAL] * count
    if len(types) != count:
        raise CheckpointError(f"{where}: {len(types)} token types for {count} tokens")
    return list(types)


def _sentencepiece(
    metadata: Mapping[str, Any],
    tokens: list[str],
    types: list[int],
    vocab: dict[str, int],
    space_prefix: bool,
    where: str,
) -> Tokenizer:
    scores = metadata.get(f"{_PREFIX}scores")
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError(f"{where}: tokenizer.ggml.scores is missing or has another length than the vocabulary")
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if metadata.get(_PREFIX + key):
            raise UnsupportedModelError(
                f"{where}: {_PREFIX}{key} is set; normalising SentencePiece models are not supported"
            )
    pieces = {token: scores[i] for token, i in vocab.items() if types[i] == TokenType.NORMAL}
    unknown = special_token_ids(metadata).get("unknown_token_id")
    return sentencepiece_tokenizer(vocab, pieces, None if unknown is None else tokens[unknown], space_prefix, where)


def _add_ends(tokenizer: Tokenizer, tokens: list[str], begin: int | None, end: int | None) -> None:
    """Make `encode` put the begin and end tokens around a text."""
    ends = [i for i in (begin, end) if i is not None]
    if not ends:
        return

    def around(piece: str, sequence: int) -> str:
        parts = [f"${piece}:{sequence}"]
        if begin is not None:
            parts.insert(0, f"{tokens[begin]}:{sequence}")
        if end is not None:
            parts.append(f"{tokens[end]}:{sequence}")
        return " ".join(parts)

    tokenizer.post_processor = processors.TemplateProcessing(
        single=around("A", 0),
        pair=f"{around('A', 0)} {around('B', 1)}",
        special_tokens=[(tokens[i], i) for i in dict.fromkeys(ends)],
    )


def _named_tokens(tokens: list[str], ids: Mapping[str, int]) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return {name: tokens[ids[f"{key}_token_id"]] for name, key in names.items() if f"{key}_token_id" in ids}


def _added_token(content: str, special: bool) -> dict[str, Any]:
    return {
        "content": content,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": special,
    }


def _further_templates(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Chat templates beside the default one, as files where transformers looks for them."""
    prefix = "tokenizer.chat_template."
    return {
        f"additional_chat_templates/{key.removeprefix(prefix)}.jinja": value.encode()
        for key, value in metadata.items()
        if key.startswith(prefix) and re.fullmatch(r"[\w-]+", key.removeprefix(prefix)) and isinstance(value, str)
    }
