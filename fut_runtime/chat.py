"""Chat templates: a conversation into the text the model was trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from fut_runtime.chat_budget import Budget, render_within
from fut_runtime.chat_sandbox import ChatEnvironment
from fut_runtime.errors import FutError

#: Templates of real models have some 30,000 characters at most.
MAX_TEMPLATE_CHARACTERS = 200_000
#: Budget of one rendering: so many characters of text, and so many a character of the conversation.
_BASE_BUDGET = 20_000_000
_BUDGET_PER_CHARACTER = 100


class ChatTemplateError(FutError):
    """A chat template is broken, does something it may not, or refuses the conversation."""


class ChatTemplate:
    """One template, compiled when first used, so that a broken one does not hinder plain text."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens`: variables such as `bos_token`, with the token's text."""
        self.source = source
        self.special_tokens = dict(special_tokens or {})

    @cached_property
    def _compiled(self) -> Callable[[Mapping[str, Any]], str]:
        return ChatEnvironment().compile_budgeted(self.source)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Text of a conversation, special tokens and BOS included: tokenise it without adding any.

        Args:
            messages: each with `role` (`system`, `user`, `assistant`, …) and `content`, a string as a rule.
            add_generation_prompt: end with what begins the assistant's turn.
            **variables: further variables of the template.

        Raises:
            ChatTemplateError: a message has no role, the template refuses the conversation or breaks its limits.
        """
        for position, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ChatTemplateError(f"message {position} is {message!r}, expected an object with a role")
            if "content" not in message and not message.keys() - {"role"}:
                raise ChatTemplateError(f"message {position} ({message['role']}) has no content")
        if len(self.source) > MAX_TEMPLATE_CHARACTERS:
            raise ChatTemplateError(
                f"the chat template has {len(self.source)} characters, more than {MAX_TEMPLATE_CHARACTERS}"
            )
        values: dict[str, Any] = {"tools": None, "documents": None, **self.special_tokens, **variables}
        values.update(messages=list(messages), add_generation_prompt=add_generation_prompt)
        budget = Budget(_BASE_BUDGET + _BUDGET_PER_CHARACTER * len(str(values)))
        try:
            return render_within(budget, lambda: self._compiled(values))
        except SecurityError as error:
            raise ChatTemplateError(f"the chat template was stopped: {error}") from error
        except TemplateSyntaxError as error:
            raise ChatTemplateError(f"the chat template is broken in line {error.lineno}: {error}") from error
        except RecursionError as error:
            raise ChatTemplateError("the chat template was stopped: it is nested or calls itself too deeply") from error
        except Exception as error:
            if type(error) is TemplateError:  # what raise_exception raises; its subclasses are Jinja's own complaints
                raise ChatTemplateError(f"the chat template refuses this conversation: {error}") from error
            raise ChatTemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error
