"""`fut-run chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from fut_runtime.commands.options import model_options, open_engine, sampling_options, sampling_params
from fut_runtime.commands.output import note, summary, write_text
from fut_runtime.errors import FutError

if TYPE_CHECKING:
    from fut_runtime.conversation import Conversation
    from fut_runtime.sampling import SamplingParams

HELP = """\
/reset          forget the conversation
/system TEXT    set the system message (nothing: remove it) and forget the conversation
/exit           leave; so does the end of input
/help           this list
Ctrl-C cuts an answer short, and leaves where none is running."""


@click.command(short_help="Converse with an artifact.")
@click.option("--system", metavar="TEXT", help="System message.")
@click.option(
    "--max-new-tokens", type=click.IntRange(1), default=1024, show_default=True, metavar="N", help="Longest answer."
)
@sampling_options
@model_options
def chat(system: str | None, max_new_tokens: int, **options: Any) -> None:
    """Converse with the artifact OUT.

    The model must have a chat template. The conversation's KV cache is kept, so each turn reads only what is new.
    Commands: /reset, /system TEXT, /exit, /help. Ctrl-C cuts an answer short.

    \b
    Examples:
      fut-run chat OUT
      fut-run chat OUT --system "Answer in one sentence." --temperature 0.7
    """
    params = sampling_params(options, max_new_tokens=max_new_tokens)
    engine, load_s = open_engine(options)
    with engine, engine.conversation(system) as conversation:
        note(f"loaded in {load_s:.1f} s; /help lists the commands")
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):  # gives input() line editing and history
                import readline  # noqa: F401
        while (line := _read_line()) is not None:
            if line.startswith("/"):
                if not _command(conversation, line):
                    return
            elif line.strip():
                _answer(conversation, line, params)


def _read_line() -> str | None:
    """The user's next line; None at the end of input.

    Raises:
        FutError: the input is not in the encoding that the terminal or the environment names.
    """
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise FutError(f"standard input: not {error.encoding.upper()} ({error.reason})") from error


def _command(conversation: Conversation, line: str) -> bool:
    """Carry out a command; returns whether the conversation goes on."""
    name, _, argument = line.strip().partition(" ")
    if name in ("/exit", "/quit"):
        return False
    if name == "/reset":
        conversation.reset()
        note("conversation forgotten")
    elif name == "/system":
        conversation.system = argument.strip() or None
        conversation.reset()
        note("system message " + ("set" if conversation.system else "removed") + ", conversation forgotten")
    else:
        if name != "/help":
            note(f"no such command: {name}")
        note(HELP)
    return True


def _answer(conversation: Conversation, text: str, params: SamplingParams) -> None:
    """Print the model's answer; an error ends the turn, not the conversation."""
    start = time.perf_counter()
    completion = None
    try:
        with contextlib.closing(conversation.say(text, params)) as events:
            for event in events:
                write_text(event.text)
                completion = event.completion
    except KeyboardInterrupt:
        write_text("\n")
        note("cut short")
        return
    except FutError as error:
        note(f"{error} (/reset starts over)")
        return
    write_text("\n")
    if completion is not None:
        note(summary([completion], time.perf_counter() - start))
