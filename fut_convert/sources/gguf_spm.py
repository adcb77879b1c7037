"""SentencePiece BPE tokenizers of GGUF files (`tokenizer.ggml.model` = llama: Llama 1 and 2, Mistral 7B).

SentencePiece keeps a score for every piece and joins, again and again, the neighbours whose union scores highest.
Ordering every way to join two pieces by the score of the union gives the merges of an ordinary BPE that does the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import Tokenizer, decoders, models, normalizers

from fut_convert.errors import CheckpointError

#: SentencePiece's stand-in for a space.
SPACE = "▁"

#: SentencePiece's own limit is 16 characters by default; long runs of spaces are the longest pieces of real models.
_MAX_PIECE = 1024


def merges_from_scores(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Merges of the pieces, best first; of several ways to join the same piece, the longest left part first.

    Args:
        scores: piece -> score, ordinary pieces only (no control, byte or unused ones).
    """
    merges = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                merges.append((score, left, right))
    merges.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in merges]


def sentencepiece_tokenizer(
    vocab: dict[str, int], scores: Mapping[str, float], unknown: str | None, space_prefix: bool, where: str
) -> Tokenizer:
    """A tokenizer without its special tokens.

    Args:
        vocab: every piece -> id, the 256 byte pieces `<0x00>` … `<0xFF>` among them.
        scores: as for `merges_from_scores`.
        unknown: the unknown piece.
        space_prefix: a space is put before the text, and before what follows a special token.
    """
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocab]
    if missing:
        raise CheckpointError(
            f"{where}: the vocabulary lacks {len(missing)} byte pieces, first <0x{missing[0]:02X}>; "
            "text outside it could not be encoded"
        )
    longest = max(scores, key=len, default="")
    if len(longest) > _MAX_PIECE:  # the ways to cut it in two are tried one by one
        raise CheckpointError(
            f"{where}: the vocabulary holds a piece of {len(longest)} characters, expected at most {_MAX_PIECE}"
        )
    try:
        model = models.BPE(
            vocab=vocab, merges=merges_from_scores(scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    except Exception as error:  # the library raises plain Exceptions
        raise CheckpointError(f"{where}: the vocabulary makes no tokenizer ({error})") from error
    tokenizer = Tokenizer(model)
    to_pieces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    to_text: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        to_pieces.insert(0, normalizers.Prepend(SPACE))
        to_text.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(to_pieces)
    tokenizer.decoder = decoders.Sequence(to_text)
    return tokenizer
