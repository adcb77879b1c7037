"""Token ids into text as they come: whole characters only, and stop strings that may span tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import Tokenizer as RawTokenizer

#: A byte token of a SentencePiece-like vocabulary with byte fallback.
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
#: Enough of a context to hold a whole character, and a token that shows the text has begun.
_CONTEXT_TOKENS = 32
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Decodes a growing token sequence; the pieces it returns join to exactly what decoding all of it gives.

    A decoder is not additive: a character may lie in several tokens, and the leading space of a text's first token is
    dropped. So each piece is the difference between decoding a short window with and without the new tokens, and the
    window moves on only where nothing that follows can change what it says: after a whole character, and, with byte
    fallback, after a token that is no byte (one bad byte turns its whole run of byte tokens into U+FFFD).
    """

    def __init__(
        self, raw: RawTokenizer, special_ids: frozenset[int], *, byte_fallback: bool, context: Sequence[int] = ()
    ) -> None:
        """Begin a text.

        Args:
            raw: the tokenizer.
            special_ids: ids that decode to nothing.
            byte_fallback: whether its decoder joins byte tokens such as <0xE2>.
            context: tokens before the first one, such as a prompt that the text continues. With a context the first
                token keeps its leading space; without, a new text begins.
        """
        self._raw = raw
        self._byte_fallback = byte_fallback
        self._special = special_ids
        #: Tokens that show the decoder what precedes the window. They decode to at least one character.
        self._before: list[int] = []
        self._before_text = ""
        self._window: list[int] = []
        self._emitted = 0
        for token in context[-_CONTEXT_TOKENS:]:
            self.push(token)
        self.flush()

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is now certain, often empty inside a character.

        Special tokens and ids without a token decode to nothing.
        """
        token = self._raw.id_to_token(token_id)
        if token is None or token_id in self._special:
            return ""
        self._window.append(token_id)
        if self._byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._text()
        if text.endswith(_REPLACEMENT):
            # The last character may be the beginning of one that later tokens complete; those before it are certain.
            return self._take(text[:-1])
        delta = self._take(text)
        self._move_on()
        return delta

    def flush(self) -> str:
        """The text still held back, an unfinished character as U+FFFD. No token may follow."""
        return self._take(self._text())

    def _text(self) -> str:
        """Text of the window."""
        decoded: str = self._raw.decode(self._before + self._window)
        return decoded[len(self._before_text) :]

    def _take(self, text: str) -> str:
        delta = text[self._emitted :]
        self._emitted += len(delta)
        return delta

    def _move_on(self) -> None:
        """Make the window what precedes the next one, unless it is empty: a leading space is dropped only once."""
        decoded: str = self._raw.decode(self._window)
        if decoded:
            self._before, self._before_text = self._window, decoded
            self._window, self._emitted = [], 0


class StopStrings:
    """Finds stop strings in streamed text and holds back what could still become one.

    The stop string that is complete first ends the text, whatever the boundaries of the pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; returns what may be shown, and the stop string found, after which nothing may follow."""
        self._held += text
        found = [(self._held.index(s) + len(s), -len(s), s) for s in self._stops if s in self._held]
        if found:
            end, _, stop = min(found)
            shown, self._held = self._held[: end - len(stop)], ""
            return shown, stop
        keep = self._partial_length()
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown, None

    def flush(self) -> str:
        """The text still held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _partial_length(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max((len(s) for s in self._stops), default=1) - 1)
        ends = (n for n in range(longest, 0, -1) if any(s.startswith(self._held[-n:]) for s in self._stops))
        return next(ends, 0)
