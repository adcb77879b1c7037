"""`fut-run generate`: one prompt with streaming output, or several as a batch."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fut_runtime.commands.options import model_options, open_engine, sampling_options, sampling_params
from fut_runtime.commands.output import completion_json, logprob_lines, note, summary, write_text
from fut_runtime.commands.prompts import as_prompt, read_prompts
from fut_runtime.streams import is_utf8

if TYPE_CHECKING:
    from fut_runtime.engine import Prompt
    from fut_runtime.generate import GenerationBatch
    from fut_runtime.results import Completion
    from fut_runtime.tokenizer import Tokenizer


@click.command(short_help="Generate text from an artifact.")
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="What to answer; several make a batch.")
@click.option(
    "--prompts-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A batch: one prompt a line; in a .jsonl file a string or an object with prompt or messages, and system.",
)
@click.option("--system", metavar="TEXT", help="System message for the chat template.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the chat template.")
@click.option(
    "--max-new-tokens", type=click.IntRange(1), default=256, show_default=True, metavar="N", help="Longest output."
)
@sampling_options
@click.option(
    "--logprobs",
    type=click.IntRange(0),
    metavar="N",
    help="Report each token's log-probability and the N most probable tokens.",
)
@click.option("--batch-size", type=click.IntRange(1), metavar="N", help="Prompts that run at once.  [default: 16]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a prompt, in their order.")
@model_options
def generate(
    prompts: tuple[str, ...],
    prompts_file: Path | None,
    system: str | None,
    raw: bool,
    max_new_tokens: int,
    logprobs: int | None,
    batch_size: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Generate text from the artifact OUT.

    The prompt becomes a user's message in the model's chat template, where it has one; --raw continues the text
    instead. Output goes to standard output as it comes, counts and timings to standard error. Without --prompt and
    --prompts-file the prompt is read from standard input.

    \b
    Examples:
      fut-run generate OUT --prompt "Why is the sky blue?"
      fut-run generate OUT --raw --prompt "Once upon a time" --max-new-tokens 64
      fut-run generate OUT --prompt "Name a colour." --temperature 0.8 --top-p 0.95 --seed 1
      fut-run generate OUT --prompts-file questions.jsonl --json > answers.jsonl
      git diff | fut-run generate OUT --system "Review this change."
    """
    if raw and system is not None:
        raise click.UsageError("--system needs the chat template, which --raw turns off")
    params = sampling_params(options, max_new_tokens=max_new_tokens, logprobs=logprobs)
    given = read_prompts(prompts, prompts_file)
    engine, load_s = open_engine(options, max_batch=batch_size)
    with engine:
        note(f"loaded in {load_s:.1f} s")
        tokenizer = engine.tokenizer
        if not raw and tokenizer is not None and tokenizer.chat_template is None:
            note("this model has no chat template: continuing the text as it is")
        ready: list[Prompt] = [as_prompt(p, system, raw=raw, tokenizer=tokenizer) for p in given]
        printer = _Printer(given, tokenizer, as_json=as_json)
        start = time.perf_counter()
        with engine.new_batch(ready, params) as batch:
            interrupted = _run(batch, printer)
            for index in range(len(given)) if interrupted else ():
                partial = batch.cancel(index)
                if partial is not None:
                    printer.finish(partial, interrupted=True)
        note(summary(printer.finished, time.perf_counter() - start, "interrupt" if interrupted else None))
    if interrupted:
        sys.exit(130)


class _Printer:
    """Prints one prompt's text as it comes; of several, each whole, in the order they were given."""

    def __init__(self, given: list[str | dict[str, Any]], tokenizer: Tokenizer | None, *, as_json: bool) -> None:
        self.finished: list[Completion] = []
        self._given = given
        self._tokenizer = tokenizer
        self._as_json = as_json
        self._streams = len(given) == 1 and not as_json
        self._shown = 0
        self._ready: dict[int, tuple[Completion, bool]] = {}
        self._next = 0

    def show(self, text: str) -> None:
        """New text of a prompt, printed now if it is the only one."""
        if self._streams:
            self._shown += len(text)
            write_text(text)

    def finish(self, completion: Completion, *, interrupted: bool = False) -> None:
        """A prompt is done; print what is due."""
        self.finished.append(completion)
        self._ready[completion.index] = (completion, interrupted)
        while self._next in self._ready:
            self._print(*self._ready.pop(self._next))
            self._next += 1

    def _print(self, completion: Completion, interrupted: bool) -> None:
        prompt = self._given[completion.index]
        if self._as_json:
            entry = completion_json(completion, prompt, self._tokenizer, interrupted=interrupted)
            write_text(json.dumps(entry, ensure_ascii=not is_utf8(sys.stdout)) + "\n")
            return
        if not self._streams:
            title = prompt if isinstance(prompt, str) else prompt.get("prompt", "(messages)")
            first_line = title.partition("\n")[0][:100]
            write_text(f"[{completion.index + 1}/{len(self._given)}] {first_line}\n")
        write_text(completion.text[self._shown :])
        write_text("" if completion.text.endswith("\n") else "\n")
        write_text("" if self._streams else "\n")
        for line in logprob_lines(completion, self._tokenizer):
            click.echo(line, err=True)


def _run(batch: GenerationBatch, printer: _Printer) -> bool:
    """Run a batch to its end; returns whether it was interrupted before."""
    try:
        while batch.unfinished:
            for event in batch.step():
                printer.show(event.text)
                if event.completion is not None:
                    printer.finish(event.completion)
    except KeyboardInterrupt:
        return True
    return False
