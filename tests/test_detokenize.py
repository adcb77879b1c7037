"""Streaming text: pieces join to the full decode, characters stay whole, stop strings are found across pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from fut_runtime.detokenize import StopStrings
from fut_runtime.tokenizer import Tokenizer
from small_tokenizers import byte_level, byte_level_raw, sentencepiece

BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()


def metaspace() -> Tokenizer:
    """Pieces without byte fallback: T5's decoder, and some Mistral conversions'."""
    vocab = {piece: i for i, piece in enumerate(["▁", "▁▁", "a", "▁a", "é", "b▁"])}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.decoder = decoders.Metaspace()
    return Tokenizer(raw)


METASPACE = metaspace()


def pieces(tokenizer: Tokenizer, ids: Sequence[int], context: Sequence[int] = ()) -> list[str]:
    stream = tokenizer.detokenizer(context)
    return [*(stream.push(i) for i in ids), stream.flush()]


def check(tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


# Ids a little beyond the vocabulary: models pad their embedding.
@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3)))
def test_byte_level_pieces_join_to_the_full_text(ids: list[int]) -> None:
    check(BYTE_LEVEL, ids)


@given(st.lists(st.integers(0, SENTENCEPIECE.vocab_size + 3)))
def test_sentencepiece_pieces_join_to_the_full_text(ids: list[int]) -> None:
    check(SENTENCEPIECE, ids)


@given(st.lists(st.integers(0, 5)))
def test_metaspace_pieces_join_to_the_full_text(ids: list[int]) -> None:
    check(METASPACE, ids)


@given(st.text())
def test_text_comes_back_in_whole_characters(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        ids = tokenizer.encode(text)
        parts = pieces(tokenizer, ids)
        assert "".join(parts) == tokenizer.decode(ids)
        for part in parts:  # a split character would come as U+FFFD, and differ from the text's own
            assert part.count("�") == 0 or "�" in text


@given(st.lists(st.integers(0, SENTENCEPIECE.vocab_size - 1), max_size=8), st.text("hello wrd.é😀", max_size=12))
def test_a_continuation_is_what_the_full_text_has_beyond_the_prompt(noise: list[int], text: str) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        ids = tokenizer.encode("hello", add_special_tokens=False) + [i for i in noise if i < tokenizer.vocab_size]
        context = ids + tokenizer.encode("a", add_special_tokens=False)  # the context ends in a whole character
        rest = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(context) + "".join(pieces(tokenizer, rest, context)) == tokenizer.decode(context + rest)


def test_leading_space() -> None:
    hello = SENTENCEPIECE.encode("hello", add_special_tokens=False)
    assert "".join(pieces(SENTENCEPIECE, hello)) == "hello"
    assert "".join(pieces(SENTENCEPIECE, hello, context=hello)) == " hello"
    spaces = [SENTENCEPIECE.raw.token_to_id("▁")] * 3
    assert pieces(SENTENCEPIECE, spaces) == ["", " ", " ", ""]


def test_an_emoji_appears_when_it_is_whole() -> None:
    ids = BYTE_LEVEL.encode("a😀b")
    assert pieces(BYTE_LEVEL, ids) == ["a", "", "", "", "😀", "b", ""]
    ids = SENTENCEPIECE.encode("a😀d", add_special_tokens=False)
    assert [p for p in pieces(SENTENCEPIECE, ids) if p] == ["a", "😀d"]


def test_a_prompt_that_ends_in_byte_tokens_is_not_repeated() -> None:
    context = SENTENCEPIECE.encode("hello 😀")
    rest = [SENTENCEPIECE.raw.token_to_id("a")]
    assert "".join(pieces(SENTENCEPIECE, rest, context)) == "a"


def test_bad_bytes_are_shown_as_soon_as_they_are_certain() -> None:
    symbols = {bytes([b]): s for b, s in zip(range(256), byte_symbols(), strict=True)}
    ids = [BYTE_LEVEL.raw.token_to_id(symbols[bytes([b])]) for b in (0xFF, 0xFE, 0x41)]
    assert pieces(BYTE_LEVEL, ids) == ["", "�", "�A", ""]


def byte_symbols() -> list[str]:
    """The byte-level alphabet in the order of bytes: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(0x100 + rest.index(b)) for b in range(256)]


def test_special_tokens_do_not_split_a_character() -> None:
    special = BYTE_LEVEL.token_id("<|im_start|>")
    assert special is not None
    e_acute = [BYTE_LEVEL.raw.token_to_id(s) for s in ("Ã", "©")]
    assert pieces(BYTE_LEVEL, [e_acute[0], special, e_acute[1]]) == ["", "", "é", ""]


def test_added_tokens_that_are_no_markup_are_text() -> None:
    think = BYTE_LEVEL.token_id("<think>")
    assert think is not None
    assert pieces(BYTE_LEVEL, [think]) == ["<think>", ""]


@pytest.mark.parametrize("seed", range(3))
def test_smollm2_random_tokens(smollm2_dir: Path, seed: int) -> None:
    import random

    tokenizer = Tokenizer.from_directory(smollm2_dir)
    check(tokenizer, random.Random(seed).choices(range(tokenizer.vocab_size), k=1000))


def test_the_full_decode_is_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level_raw(), clean_up_tokenization_spaces=False)
    for text in ("hello wörld 😀", " a  b", "<think>x<|im_end|>"):
        ids = BYTE_LEVEL.encode(text)
        assert ids == theirs.encode(text)
        assert "".join(pieces(BYTE_LEVEL, ids)) == theirs.decode(ids, skip_special_tokens=True)


def feed(stops: Sequence[str], parts: Sequence[str]) -> tuple[str, str | None]:
    matcher = StopStrings(stops)
    shown = ""
    for part in parts:
        text, stop = matcher.push(part)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.text("abc", max_size=30),
    st.lists(st.integers(0, 30), max_size=8),
)
def test_stop_strings_do_not_depend_on_how_text_is_cut(stops: list[str], text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    parts = [text[a:b] for a, b in pairwise(edges)]
    ends = [(text.index(s) + len(s), -len(s), s) for s in stops if s in text]
    expected = (text[: min(ends)[0] + min(ends)[1]], min(ends)[2]) if ends else (text, None)
    assert feed(stops, parts) == feed(stops, list(text)) == expected


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    matcher = StopStrings(["###", "\nUser:"])
    assert matcher.push("one #") == ("one ", None)
    assert matcher.push("2\nUs") == ("#2", None)
    assert matcher.push("e it") == ("\nUse it", None)
    assert matcher.push(" ##") == (" ", None)
    assert matcher.flush() == "##"
