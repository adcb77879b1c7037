"""The artifact's tokenizer: text to token ids and back, special tokens, and which chat template belongs to it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from fut_runtime.artifact.json_text import strict_json
from fut_runtime.chat import ChatTemplate
from fut_runtime.detokenize import Detokenizer
from fut_runtime.errors import FutError

#: Special tokens that chat templates know by name.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(FutError):
    """The artifact has no usable tokenizer, or its files contradict each other."""


class Tokenizer:
    """A `tokenizer.json` with what `tokenizer_config.json` says about it.

    Attributes:
        config: contents of `tokenizer_config.json`, with `special_tokens_map.json` filling gaps.
        chat_template: the chat template, or None where the model has none.
        special_tokens: text of the named special tokens (`bos_token`, `eos_token`, …) that are set.
    """

    def __init__(
        self, raw: RawTokenizer, config: Mapping[str, Any] | None = None, chat_template: str | None = None
    ) -> None:
        self.raw = raw
        # A tokenizer saved while padding or truncating would silently cut prompts.
        raw.no_padding()
        raw.no_truncation()
        self.config = dict(config or {})
        self.special_tokens = {
            name: text for name in _NAMED_TOKENS if (text := _token_text(self.config.get(name))) is not None
        }
        source = chat_template if chat_template is not None else _config_template(self.config)
        self.chat_template = None if source is None else ChatTemplate(source, self.special_tokens)

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Read `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` of an artifact or a checkpoint.

        Raises:
            TokenizerError: `tokenizer.json` is missing or cannot be read, or another file is not what it should be.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(
                f"{path} has no tokenizer.json, so text cannot be tokenised. Copy the file from the source model "
                "(transformers writes it with AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIR)) and convert "
                "again; token ids can be used as prompts without it"
            )
        with library_errors(f"{file}: the tokenizers library cannot read it"):
            raw = RawTokenizer.from_file(str(file))
        config = {**_read_object(path / "special_tokens_map.json"), **_read_object(path / "tokenizer_config.json")}
        template = path / "chat_template.jinja"
        return cls(raw, config, _read_text(template) if template.is_file() else None)

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text, where the tokenizer names one."""
        return self.token_id(self.special_tokens.get("bos_token"))

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text or a turn, where the tokenizer names one."""
        return self.token_id(self.special_tokens.get("eos_token"))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The model's rows may be more."""
        return self.raw.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that are markup, not text."""
        return frozenset(i for i, token in self.raw.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def _byte_fallback(self) -> bool:
        """Whether the decoder joins byte tokens such as <0xE2>."""
        if self.raw.decoder is None:
            return False
        state = json.loads(self.raw.decoder.__getstate__())
        return any(part.get("type") == "ByteFallback" for part in state.get("decoders", [state]))

    def token_id(self, text: str | None) -> int | None:
        """Id of the token spelled exactly so in the vocabulary, or None."""
        return None if text is None else self.raw.token_to_id(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any string; special tokens spelled in it become those tokens, as in transformers.
            add_special_tokens: add the BOS the tokenizer asks for (`add_bos_token` where the config says it, else the
                post-processor of tokenizer.json). A text that spells the BOS itself keeps one, not two. False is for
                rendered chat templates, which hold all markup already. An EOS is never added: a prompt goes on.

        Raises:
            TokenizerError: the text holds half a surrogate pair, or the tokenizer is damaged.
        """
        check_unicode(text, "the text")
        with library_errors("this tokenizer cannot encode the text; its tokenizer.json is damaged"):
            plain: list[int] = self.raw.encode(text, add_special_tokens=False).ids
        if not add_special_tokens:
            return plain
        prefix = self._prefix
        if prefix and prefix[-1] == self.bos_token_id and plain[:1] == prefix[-1:]:
            prefix = prefix[:-1]
        return prefix + plain

    @cached_property
    def _prefix(self) -> list[int]:
        """What the tokenizer puts before a text: its BOS, as a rule."""
        wanted = self.config.get("add_bos_token")
        if isinstance(wanted, bool):
            return [self.bos_token_id] if wanted and self.bos_token_id is not None else []
        probe = "a"
        plain: list[int] = self.raw.encode(probe, add_special_tokens=False).ids
        full: list[int] = self.raw.encode(probe, add_special_tokens=True).ids
        starts = (i for i in range(len(full)) if plain and full[i : i + len(plain)] == plain)
        return full[: next(starts, 0)]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Token ids of a conversation, ready for the assistant's next turn.

        Args:
            messages: each with `role` and `content`.
            variables: further variables of the template, such as `tools` or `enable_thinking`.

        Raises:
            TokenizerError: the model has no chat template.
            ChatTemplateError: the template refuses the messages or is broken.
        """
        if self.chat_template is None:
            raise TokenizerError(
                "this model's tokenizer has no chat template, so it cannot hold a conversation; "
                "give it plain text to continue (fut-run generate --raw)"
            )
        return self.encode(self.chat_template.render(messages, **variables), add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids without a token are left out, bytes that are no UTF-8 become U+FFFD."""
        text: str = self.raw.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def piece(self, token_id: int) -> str:
        """Text of one token by itself, special tokens spelled out: for showing, not for joining."""
        return self.decode([token_id], skip_special_tokens=False)

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """A stream that turns token ids into text as they come, following the tokens of `context`."""
        return Detokenizer(self.raw, self.special_ids, byte_fallback=self._byte_fallback, context=context)


@contextmanager
def library_errors(message: str) -> Iterator[None]:
    """Turn what the tokenizers library raises into a TokenizerError with this message and the library's own.

    That is bare Exception, and for files that it did not foresee a panic, which is no Exception at all.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{message} ({error})") from error


def check_unicode(text: str, what: str) -> None:
    """Refuse what Python takes for text and no tokenizer does.

    Raises:
        TokenizerError: `text` holds half a surrogate pair, as Python makes of command lines that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"{what} holds {text[error.start]!r} (character {error.start}), which is half a surrogate pair and no "
            "Unicode character; it was not UTF-8 where it came from"
        ) from error


def _token_text(value: Any) -> str | None:
    """Text of a special token as configs write it: a string, or an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _config_template(config: Mapping[str, Any]) -> str | None:
    """The template of a config: a string, or the one named `default` of a list of named templates."""
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, Mapping)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"tokenizer_config.json: chat_template is {type(value).__name__}, expected a string")
    return value


def _read_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = strict_json(_read_text(file), constants=True)
    except ValueError as error:
        raise TokenizerError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file}: holds {type(value).__name__}, expected a JSON object")
    return value


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{file}: cannot be read as UTF-8 text ({error})") from error
