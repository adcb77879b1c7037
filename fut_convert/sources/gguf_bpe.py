"""Byte-level BPE tokenizers of GGUF files (`tokenizer.ggml.model` = gpt2), rebuilt for the tokenizers library.

A GGUF holds vocabulary and merges, but only a name for how text is split before them (`tokenizer.ggml.pre`). What each
name stands for is taken from the tokenizer.json of the models that use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from fut_convert.errors import CheckpointError, UnsupportedModelError

_WORDS_AND_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Split:
    """How text is prepared for BPE.

    Attributes:
        pattern: regular expression whose matches are the words; None for GPT-2's own, built into the library.
        single_digits: every digit is a word (before the pattern).
        nfc: text is put into Unicode's composed form first.
        whole_words: a word that is in the vocabulary is taken whole, whatever the merges say.
        add_bos: what llama.cpp does when the file has no `add_bos_token`.
    """

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


_GPT2 = Split()
_LLAMA3 = Split(_WORDS_AND_DIGITS % "{1,3}", whole_words=True, add_bos=True)

#: `tokenizer.ggml.pre` -> how text is split.
SPLITS: dict[str, Split] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": Split(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": Split(_WORDS_AND_DIGITS % "", nfc=True),
    "tekken": Split(_CASED_WORDS, whole_words=True, add_bos=True),
}


def split_of(name: str | None, where: str) -> Split:
    """How the file's text is split.

    Raises:
        UnsupportedModelError: the file does not say, or uses a name that is not known: guessing would tokenize some
            texts wrongly and nobody would notice.
    """
    if name is None:
        raise UnsupportedModelError(
            f"{where}: has no tokenizer.ggml.pre, so how its text is split into words is unknown; "
            "take a newer GGUF of the model, or the original checkpoint"
        )
    if name not in SPLITS:
        raise UnsupportedModelError(
            f"{where}: pre-tokenizer {name!r} is not supported; supported are {', '.join(SPLITS)}; "
            "convert the original checkpoint, whose tokenizer is copied as it is"
        )
    return SPLITS[name]


def byte_level_tokenizer(vocab: dict[str, int], merges: Sequence[str], split: Split, where: str) -> Tokenizer:
    """A tokenizer without its special tokens.

    Args:
        vocab: token -> id, tokens in GPT-2's byte alphabet.
        merges: `left right`, best first.
    """
    pairs = []
    for merge in merges:
        left, separator, right = merge.partition(" ")
        if not separator or not left or not right:
            raise CheckpointError(f"{where}: tokenizer.ggml.merges holds {merge!r}, expected two tokens")
        pairs.append((left, right))
    try:
        model = models.BPE(vocab=vocab, merges=pairs, fuse_unk=False, byte_fallback=False)
    except Exception as error:  # the library raises plain Exceptions
        raise CheckpointError(f"{where}: vocabulary and merges do not fit together ({error})") from error
    model.ignore_merges = split.whole_words
    tokenizer = Tokenizer(model)
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated", invert=False))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=split.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
