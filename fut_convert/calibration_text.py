"""A calibration text as packed windows of token ids."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from fut_convert.errors import ConvertError
from fut_convert.recipe import BUILTIN_TEXT, CalibrationRecipe
from fut_convert.sources import Source

TOKENIZER_FILE = "tokenizer.json"
_SHIPPED = Path(__file__).with_name("data") / "calibration.txt"


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

    The tokenizer adds what it adds to any text, a BOS where it adds one. A text shorter than one window gives one
    shorter window; windows are never longer than the model's positions.

    Raises:
        ConvertError: no tokenizer, an unreadable text, fewer than two tokens, or ids beyond the vocabulary.
    """
    path = _SHIPPED if recipe.text == BUILTIN_TEXT else Path(recipe.text).expanduser()
    try:
        data = path.read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise ConvertError(f"calibration text {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConvertError(f"calibration text {path.name}: not UTF-8 ({error}); convert it first") from error
    ids = _tokenizer(source).encode(text).ids
    if len(ids) < 2:
        raise ConvertError(f"calibration text {path.name} has {len(ids)} tokens; give a longer one")
    if max(ids) >= source.spec.vocab_size:
        raise ConvertError(
            f"{TOKENIZER_FILE} gives id {max(ids)}, but the embedding has {source.spec.vocab_size} rows: "
            "tokenizer and weights do not belong together"
        )
    length = min(recipe.window_tokens, source.spec.max_position_embeddings, len(ids))
    count = min(recipe.windows, len(ids) // length)
    record = {
        "text": BUILTIN_TEXT if path == _SHIPPED else path.name,
        "sha256": hashlib.sha256(data).hexdigest(),
        "windows": count,
        "window_tokens": length,
    }
    return CalibrationWindows(torch.tensor(ids[: count * length], dtype=torch.int64).view(count, length), record)


def _tokenizer(source: Source) -> Tokenizer:
    for name, content in source.side_files():
        if name == TOKENIZER_FILE:
            data = content if isinstance(content, bytes) else content.read_bytes()
            try:
                return Tokenizer.from_str(data.decode("utf-8"))
            except Exception as error:  # the library raises bare Exception for a file it cannot parse
                raise ConvertError(f"{TOKENIZER_FILE}: cannot be read ({error})") from error
    raise ConvertError(
        f"the checkpoint has no {TOKENIZER_FILE}, so a calibration text cannot be tokenized; "
        "add it, or convert with --no-calibration"
    )
