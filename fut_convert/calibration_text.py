"""A calibration text as packed windows of token ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer as RawTokenizer
from torch import Tensor

from fut_convert.calibration_documents import open_calibration_text
from fut_convert.errors import ConvertError
from fut_convert.recipe import CalibrationRecipe
from fut_convert.sources import Source
from fut_convert.sources.read_errors import read_errors
from fut_runtime.artifact.json_text import strict_json
from fut_runtime.tokenizer import Tokenizer, TokenizerError, library_errors

TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILES = ("special_tokens_map.json", "tokenizer_config.json")
#: Characters tokenized at first for each token wanted: twice what a token of ordinary text has.
_CHARACTERS_PER_TOKEN = 8
#: Tokens beside the place where a text was cut may differ from those of the whole text; so many are not used.
_TOKENS_NEAR_CUT = 256


@dataclass(frozen=True)
class CalibrationWindows:
    """Windows int64 [windows, tokens] and the record that goes into the manifest."""

    ids: Tensor
    record: dict[str, Any]

    @property
    def tokens(self) -> int:
        """Tokens in all windows."""
        return self.ids.numel()


def calibration_windows(source: Source, recipe: CalibrationRecipe) -> CalibrationWindows:
    """Tokenize a text with the checkpoint's tokenizer and cut it into windows without padding.

    The text begins as every prompt will, with a BOS where the tokenizer adds one. A text shorter than one window gives
    one shorter window; windows are never longer than the model's positions.

    Raises:
        ConvertError: no tokenizer, an unreadable text, fewer than two tokens, or ids beyond the vocabulary.
    """
    text = open_calibration_text(recipe)
    tokenizer = checkpoint_tokenizer(source)
    ids = first_tokens(tokenizer, text.read, recipe.windows * recipe.window_tokens)
    if len(ids) < 2:
        raise ConvertError(f"calibration text {text.name} has {len(ids)} tokens; give a longer one")
    if max(ids) >= source.spec.vocab_size:
        raise ConvertError(
            f"{TOKENIZER_FILE} gives id {max(ids)}, but the embedding has {source.spec.vocab_size} rows: "
            "tokenizer and weights do not belong together"
        )
    length = min(recipe.window_tokens, source.spec.max_position_embeddings, len(ids))
    count = min(recipe.windows, len(ids) // length)
    record = {**text.record(), "windows": count, "window_tokens": length}
    return CalibrationWindows(torch.tensor(ids[: count * length], dtype=torch.int64).view(count, length), record)


def tokenizer_warnings(source: Source) -> list[str]:
    """What will keep the artifact's tokenizer from serving its model, where no calibration has come upon it.

    A checkpoint without a tokenizer is warned of by `Source.check`.
    """
    if not any(name == TOKENIZER_FILE for name, _ in source.side_files()):
        return []
    try:
        tokenizer = checkpoint_tokenizer(source)
    except ConvertError as error:
        return [f"{error}: the artifact will not encode text"]
    last = max(tokenizer.raw.get_vocab(with_added_tokens=True).values(), default=-1)
    if last < source.spec.vocab_size:
        return []
    return [
        f"{TOKENIZER_FILE} has ids up to {last}, but the embedding has {source.spec.vocab_size} rows: tokenizer and "
        "weights may not belong together, and prompts with ids beyond the rows will be refused"
    ]


def first_tokens(tokenizer: Tokenizer, read: Callable[[int], str], wanted: int) -> list[int]:
    """Up to `wanted` token ids from the beginning of a text, reading and tokenizing little more of it than they take.

    Args:
        read: as `CalibrationText.read`.
    """
    characters = _CHARACTERS_PER_TOKEN * (wanted + _TOKENS_NEAR_CUT)
    while True:
        # One character more than is tokenized shows whether anything follows.
        text = read(characters + 1)
        ids = tokenizer.encode(text[:characters])
        if characters >= len(text) or len(ids) >= wanted + _TOKENS_NEAR_CUT:
            return ids[:wanted]
        characters *= 2


def checkpoint_tokenizer(source: Source) -> Tokenizer:
    files = {name: content for name, content in source.side_files() if name in (TOKENIZER_FILE, *_CONFIG_FILES)}
    if TOKENIZER_FILE not in files:
        raise ConvertError(
            f"the checkpoint has no {TOKENIZER_FILE}, so a text cannot be tokenized; "
            "add it, or convert with --no-calibration and without --evaluate"
        )
    with read_errors(TOKENIZER_FILE):
        contents = {n: c if isinstance(c, bytes) else c.read_bytes() for n, c in files.items()}
    try:
        with library_errors(f"{TOKENIZER_FILE}: cannot be read"):
            raw = RawTokenizer.from_str(contents[TOKENIZER_FILE].decode("utf-8"))
    except TokenizerError as error:
        raise ConvertError(str(error)) from error
    config: dict[str, Any] = {}
    for name in _CONFIG_FILES:
        try:
            config |= strict_json(contents.get(name, b"{}"), constants=True)
        except (ValueError, TypeError) as error:
            raise ConvertError(f"{name}: not a JSON object ({error})") from error
    # A chat template that cannot be read is no reason not to calibrate.
    config.pop("chat_template", None)
    return Tokenizer(raw, config)
