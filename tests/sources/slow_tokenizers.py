"""Slow and plain encoders for the vocabularies of GGUF files, and texts that tell tokenizers apart."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "In 2000, 12 cats  sat;\tthen 1234567 more.",
    "  leading, trailing  ",
    "don't I'LL we've it's",
    "a\nb\r\n\r\n c\n\n\n",
    "Größe, naïve, Ελληνικά, Русский, עברית, العربية, हिन्दी",
    "数字123和中文，日本語テキスト、한국어",
    "½ ⅓ Ⅻ ² ٣ 𝟘",
    "emoji 🙂👩‍👩‍👧‍👦🏳️‍🌈 and \u200bzero width",
    "e\u0301 against \u00e9, \ufb01 ligature",
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2 // 3}  # ok/no\n",
    "http://example.org/a_b?c=%20&d=1#e",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>x<|im_end|><|im_end|>",
    "<|im_start |> not special <im_end>",
    "CamelCase HTTPServer iPhone ÀÉÎ",
    "\x00\x01\x7f control",
    "a" * 50 + " " * 20 + "!" * 10,
)

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_alphabet() -> dict[int, str]:
    """GPT-2's spelling of bytes: printable ones as they are, the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def slow_bpe(
    text: str, metadata: dict[str, Any], split: Callable[[str], list[str]], whole_words: bool = False
) -> list[int]:
    """Encode text without special tokens: words, bytes, then the best merge, leftmost first, until none is left."""
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    alphabet, out = byte_alphabet(), []
    for word in split(text):
        parts = [alphabet[byte] for byte in word.encode()]
        if whole_words and "".join(parts) in ids:
            parts = ["".join(parts)]
        while True:
            pairs = [(ranks.get((a, b), len(ranks)), i) for i, (a, b) in enumerate(pairwise(parts))]
            rank, at = min(pairs, default=(len(ranks), 0))
            if rank == len(ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        out += [ids[part] for part in parts]
    return out


def splitter(pattern: str) -> Callable[[str], list[str]]:
    regex = pytest.importorskip("regex")
    compiled = regex.compile(pattern)

    def split(text: str) -> list[str]:
        words, at = [], 0
        for match in compiled.finditer(text):
            words += [text[at : match.start()], match.group()]
            at = match.end()
        return [word for word in [*words, text[at:]] if word]

    return split


def gpt2_split(text: str) -> list[str]:
    return splitter(GPT2_WORDS)(text)


def smollm_split(text: str) -> list[str]:
    digits, words = splitter(r"\p{N}"), splitter(GPT2_WORDS)
    return [word for part in digits(text) for word in words(part)]


def qwen_split(text: str) -> list[str]:
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    return splitter(pattern)(unicodedata.normalize("NFC", text))


def llama3_split(text: str) -> list[str]:
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    return splitter(pattern)(text)


def tekken_split(text: str) -> list[str]:
    upper, lower = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    pattern = (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{upper}]*[{lower}]+|[^\r\n\p{{L}}\p{{N}}]?[{upper}]+[{lower}]*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return splitter(pattern)(text)


SLOW_SPLITS: dict[str, Callable[[str], list[str]]] = {
    "gpt-2": gpt2_split,
    "default": gpt2_split,
    "smollm": smollm_split,
    "qwen2": qwen_split,
    "llama-bpe": llama3_split,
    "llama3": llama3_split,
    "llama-v3": llama3_split,
    "tekken": tekken_split,
}
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")


def slow_sentencepiece(text: str, metadata: dict[str, Any], prefix: bool = True) -> list[int]:
    """Join the neighbours whose union scores highest, leftmost first; spell out in bytes what is left unknown."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    known = {token: scores[i] for i, token in enumerate(tokens) if metadata["tokenizer.ggml.token_type"][i] == 1}
    parts = list((f" {text}" if prefix and text else text).replace(" ", "▁"))
    while True:
        unions = [(-known[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in known]
        if not unions:
            break
        at = min(unions)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    out = []
    for part in parts:
        out += [tokens.index(part)] if part in known else [3 + byte for byte in part.encode()]
    return out
