"""`fut-run`: generate from an artifact, chat with it, measure it, and see what works on this machine."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from fut_runtime import __version__
from fut_runtime.command_errors import reported_errors
from fut_runtime.streams import prepare_streams

#: Command → where it lives. A command's module is imported when the command is used: PyTorch takes seconds to load.
_COMMANDS: dict[str, tuple[str, str]] = {
    "generate": ("fut_runtime.commands.generate", "generate"),
    "chat": ("fut_runtime.commands.chat", "chat"),
    "eval": ("fut_runtime.evaluate.cli", "eval_group"),
    "bench": ("fut_runtime.commands.bench", "bench"),
    "info": ("fut_runtime.commands.info", "info"),
}


class CommandGroup(click.Group):
    """Commands imported when used, and errors as messages with an exit code instead of tracebacks."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Commands in the order a newcomer meets them."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; exit 1 with a message for what went wrong on purpose, 130 for an interrupt."""
        prepare_streams()
        with reported_errors(out_of_memory="out of memory; a smaller batch or context needs less"):
            return super().invoke(ctx)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fut-run")
def main() -> None:
    """Generate text from an artifact that fut-convert made.

    OUT is the artifact: its directory, or the id of a repository on the Hugging Face Hub.

    \b
    Examples:
      fut-run generate OUT --prompt "Why is the sky blue?"
      fut-run chat OUT
      fut-run eval perplexity OUT --text FILE
      fut-run bench decode --shape 8b
      fut-run info OUT

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
    """
