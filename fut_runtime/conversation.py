"""A conversation that keeps its history, and reads only what is new of it at each turn."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import TYPE_CHECKING

from fut_runtime.request import KeptCache
from fut_runtime.results import Completion, TokenEvent
from fut_runtime.sampling import SamplingParams
from fut_runtime.tokenizer import TokenizerError

if TYPE_CHECKING:
    from fut_runtime.engine import Engine


class Conversation:
    """Turns of a user and the model.

    The KV cache is kept between turns. A new turn's prompt is the whole conversation, rendered and tokenised anew;
    where it extends the tokens the cache holds, only the rest is prefilled, and otherwise (a template that drops the
    reasoning of earlier turns, text that tokenises differently) all of it.

    Attributes:
        system: the system message, or None.
        messages: user and assistant messages so far.
    """

    def __init__(self, engine: Engine, system: str | None = None) -> None:
        """Begin a conversation.

        Raises:
            TokenizerError: the model has no chat template.
        """
        if engine.tokenizer is None or engine.tokenizer.chat_template is None:
            raise TokenizerError(
                "this model has no chat template, so it cannot hold a conversation; "
                "let it continue plain text instead (fut-run generate --raw)"
            )
        self.system = system
        self.messages: list[dict[str, str]] = []
        self._engine = engine
        self._cache = KeptCache()

    def say(self, text: str, params: SamplingParams | None = None) -> Generator[TokenEvent, None, None]:
        """Say something; the answer comes an event a token.

        The turn joins the history when the answer ends. An answer cut short (by closing the iterator, or by an
        interrupt) joins as far as it came; a turn that fails, or is cut before its first token, leaves no trace.

        Raises:
            ChatTemplateError: the template refuses the conversation.
            PromptError: the conversation has outgrown the model's context.
        """
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        turn = [*self.messages, {"role": "user", "content": text}]
        prompt_ids = self._engine.encode([*system, *turn])
        batch = self._engine.new_batch()
        index = batch.add(prompt_ids, params or SamplingParams(), continues=False, cache=self._cache)
        completion: Completion | None = None
        try:
            while batch.unfinished:
                for event in batch.step():
                    completion = event.completion
                    yield event
        except Exception:
            batch.close()
            raise
        finally:
            completion = completion or batch.cancel(index)
            batch.close()
            if completion is not None and completion.token_ids:
                self.messages = [*turn, {"role": "assistant", "content": completion.text}]

    def reset(self) -> None:
        """Forget every turn; the system message stays."""
        self.messages = []

    def close(self) -> None:
        """Free the kept cache."""
        if self._cache.handle is not None:
            self._engine.backend.close_request(self._cache.handle)
            self._cache.handle = None

    def __enter__(self) -> Conversation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
