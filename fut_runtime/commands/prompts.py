"""Where prompts come from: the command line, a file, or standard input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fut_runtime.errors import FutError

if TYPE_CHECKING:
    from fut_runtime.engine import Prompt
    from fut_runtime.tokenizer import Tokenizer

_JSON_KEYS = {"prompt", "messages", "system"}


class PromptFileError(FutError):
    """A file of prompts cannot be read, or a line of it is no prompt."""


def read_prompts(texts: tuple[str, ...], file: Path | None) -> list[str | dict[str, Any]]:
    """Prompts as given: texts, or objects with `prompt` or `messages` and perhaps `system`.

    A file whose name ends in .jsonl holds one JSON string or object a line; any other, one prompt a line, empty lines
    apart. Without either, standard input is one prompt.

    Raises:
        click.UsageError: no prompt at all, or more than one source.
        PromptFileError: the file is unreadable; the message names the line.
    """
    if texts and file is not None:
        raise click.UsageError("give --prompt or --prompts-file, not both")
    if texts:
        return list(texts)
    if file is not None:
        return _read_file(file)
    if sys.stdin.isatty():
        raise click.UsageError("no prompt: give --prompt TEXT or --prompts-file FILE, or pipe one in")
    text = _decode(sys.stdin.buffer.read(), "standard input").rstrip("\n")
    if not text:
        raise click.UsageError("standard input holds no prompt")
    return [text]


def as_prompt(given: str | dict[str, Any], system: str | None, *, raw: bool, tokenizer: Tokenizer | None) -> Prompt:
    """What the engine takes for a prompt: messages where the model has a chat template, else the text itself.

    Raises:
        PromptFileError: messages or a system message, but no chat template to put them in.
    """
    entry = given if isinstance(given, dict) else {"prompt": given}
    system = entry.get("system", system)
    templated = not raw and tokenizer is not None and tokenizer.chat_template is not None
    if not templated:
        if "messages" in entry or system is not None:
            reason = "--raw turns it off" if raw else "this model has none"
            raise PromptFileError(f"messages and a system message need a chat template, and {reason}")
        text: str = entry["prompt"]
        return text
    messages = entry.get("messages") or [{"role": "user", "content": entry["prompt"]}]
    return [{"role": "system", "content": system}, *messages] if system is not None else list(messages)


def _read_file(file: Path) -> list[str | dict[str, Any]]:
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise PromptFileError(f"{file}: {error.strerror}") from error
    lines = enumerate(_decode(data, str(file)).splitlines(), start=1)
    filled = [(number, line) for number, line in lines if line.strip()]
    if not filled:
        raise PromptFileError(f"{file} holds no prompts")
    if file.suffix in (".jsonl", ".ndjson"):
        return [_json_prompt(line, f"{file}, line {number}") for number, line in filled]
    return [line for _, line in filled]


def _json_prompt(line: str, where: str) -> str | dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptFileError(f"{where}: not valid JSON ({error})") from error
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise PromptFileError(f"{where}: expected a string or an object, found {type(value).__name__}")
    unknown = sorted(set(value) - _JSON_KEYS)
    if unknown:
        raise PromptFileError(f"{where}: unknown keys {unknown}, expected among {sorted(_JSON_KEYS)}")
    if ("prompt" in value) == ("messages" in value):
        raise PromptFileError(f"{where}: expected either prompt or messages")
    for key, kind in (("prompt", str), ("messages", list), ("system", str)):
        if key in value and (not isinstance(value[key], kind) or not value[key]):
            raise PromptFileError(f"{where}: {key} is {value[key]!r}, expected a non-empty {kind.__name__}")
    return value


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptFileError(f"{where}: byte {error.start} is not UTF-8") from error
