"""The text that a conversion's accuracy is measured on, and what it has in common with the calibration text."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fut_convert.calibration_text import CalibrationWindows, checkpoint_tokenizer, first_tokens
from fut_convert.errors import ConvertError
from fut_convert.recipe import BUILTIN_TEXT
from fut_convert.sources import Source
from fut_runtime.artifact.paths import plain_name

#: Tokens of an evaluation window, unless the model or the text is shorter.
WINDOW_TOKENS = 2048
#: So many tokens in a row are a passage: shorter ones occur in texts that have nothing to do with each other.
_PASSAGE_TOKENS = 16
#: Shared passages below this share are quotations.
_QUOTED_SHARE = 0.01


def evaluation_windows(source: Source, text: Path, windows: int | None) -> CalibrationWindows:
    """Tokenize a text with the checkpoint's tokenizer and cut it into windows that do not overlap.

    Args:
        text: UTF-8 file.
        windows: use only so many, the first; None for all.

    Returns:
        int64 [windows, tokens], and a record of the text: name, SHA-256, windows and their tokens.

    Raises:
        ConvertError: no tokenizer, an unreadable text, fewer than two tokens, or ids beyond the vocabulary.
    """
    try:
        data = text.expanduser().read_bytes()
        content = data.decode("utf-8")
    except OSError as error:
        raise ConvertError(f"evaluation text {text}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConvertError(f"evaluation text {text.name}: not UTF-8 ({error}); convert it first") from error
    tokenizer = checkpoint_tokenizer(source)
    longest = min(WINDOW_TOKENS, source.spec.max_position_embeddings)
    ids = (
        tokenizer.encode(content)
        if windows is None
        else first_tokens(tokenizer, lambda n: content[:n], windows * longest)
    )
    if len(ids) < 2:
        raise ConvertError(f"evaluation text {text.name} has {len(ids)} tokens; give a longer one")
    if max(ids) >= source.spec.vocab_size:
        raise ConvertError(
            f"evaluation text {text.name}: the tokenizer gives id {max(ids)}, but the embedding has "
            f"{source.spec.vocab_size} rows: tokenizer and weights do not belong together"
        )
    length = min(longest, len(ids))
    count = len(ids) // length
    record = {
        "text": plain_name(text.name),
        "sha256": hashlib.sha256(data).hexdigest(),
        "windows": count,
        "window_tokens": length,
        "whole_text": windows is None,
    }
    return CalibrationWindows(torch.tensor(ids[: count * length], dtype=torch.int64).view(count, length), record)


def independence_note(evaluation: CalibrationWindows, calibration: CalibrationWindows | None) -> str:
    """One sentence for the reader: whether the weights were fitted to what they are measured on."""
    if calibration is None:
        return "Nothing was calibrated, so the weights cannot be fitted to this text."
    ours, theirs = evaluation.record, calibration.record
    seen = "the one that ships with the converter" if theirs["text"] == BUILTIN_TEXT else str(theirs["text"])
    if ours["sha256"] == theirs.get("sha256"):
        return (
            f"**The artifact was calibrated on this very text ({ours['text']}): the figures flatter it.** "
            "Measure it on another text before you trust them."
        )
    share = shared_passages(evaluation.ids, calibration.ids)
    if share > _QUOTED_SHARE:
        return (
            f"**{100 * share:.0f} % of this text's tokens stand in passages that calibration saw as well ({seen}): "
            "the figures flatter the artifact.**"
        )
    if _corpus(str(ours["text"])) == _corpus(str(theirs["text"])):
        return (
            f"By its name this text ({ours['text']}) is of the calibration text's corpus ({seen}), though the two "
            "share no passages: expect a little more loss on other texts."
        )
    return f"The calibration text ({seen}) is another one and shares no passages with this."


def shared_passages(ids: Tensor, seen: Tensor) -> float:
    """Share of the tokens of `ids` that lie in a run of 16 tokens that `seen` holds as well; both int64."""
    ours, theirs = (_passages(x) for x in (ids, seen))
    if len(ours) == 0 or len(theirs) == 0:
        return 0.0
    covered = np.zeros(ids.numel(), dtype=bool)
    for begin in np.flatnonzero(np.isin(ours, theirs)):
        covered[begin : begin + _PASSAGE_TOKENS] = True
    return float(covered.mean())


def _passages(ids: Tensor) -> np.ndarray[Any, np.dtype[np.void]]:
    """Every run of 16 tokens as one value that compares."""
    flat = ids.flatten().numpy()
    if len(flat) < _PASSAGE_TOKENS:
        return np.empty(0, dtype=np.dtype((np.void, 8 * _PASSAGE_TOKENS)))
    runs = np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(flat, _PASSAGE_TOKENS))
    return runs.view(np.dtype((np.void, runs.itemsize * _PASSAGE_TOKENS))).ravel()


def _corpus(name: str) -> str:
    """The first word of a file's name: `wikitext2` of `wikitext2-raw-test.txt`."""
    return re.split(r"[^a-z0-9]+", name.lower().lstrip("._-"))[0]
