"""What one rendering of a chat template may cost, and the prices of operations that can multiply a text."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

#: Price of a loop turn, a call or a value that is no text, in characters of text.
STEP = 16
#: Longest a template may run.
SECONDS = 10.0
#: Largest number a filter or a format may be given: a width or an indent, as a rule.
_MAX_ARGUMENT = 10_000


class Budget:
    """What one rendering may still do: characters of text, and time."""

    def __init__(self, characters: int) -> None:
        self._left = characters
        self._deadline = time.monotonic() + SECONDS

    def spend(self, characters: int) -> None:
        """Take from the budget.

        Raises:
            SecurityError: nothing is left, or time is up.
        """
        self._left -= characters
        if self._left < 0:
            raise SecurityError("it makes too much text or takes too many steps")
        if time.monotonic() > self._deadline:
            raise SecurityError(f"it runs longer than {SECONDS:.0f} s")

    def spend_on(self, value: object) -> None:
        """Pay for the text of a value: nested lists are walked, since shared parts can hide an exponential size."""
        if isinstance(value, str | bytes):
            self.spend(len(value))
            return
        self.spend(STEP)
        if isinstance(value, Namespace):
            value = dict.copy(object.__getattribute__(value, "_Namespace__attrs"))
        if isinstance(value, Mapping):
            value = [*value.keys(), *value.values()]
        if isinstance(value, Collection) and not isinstance(value, range):
            for item in value:
                self.spend_on(item)


_current: ContextVar[Budget] = ContextVar("chat_template_budget")


def current_budget() -> Budget:
    """Budget of the rendering that is going on."""
    return _current.get()


def render_within(budget: Budget, render: Callable[[], str]) -> str:
    """Run `render` with its operations paid from `budget`."""
    token = _current.set(budget)
    try:
        return render()
    finally:
        _current.reset(token)


def price_text_operation(
    name: str, text: str | bytes, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Pay for what the string method or filter `name` may add to `text`, before it runs.

    Returns:
        The positional arguments to call it with: an iterator that had to be counted comes back as a list.
    """
    values = (*args, *kwargs.values())
    numbers = [v for v in values if isinstance(v, int)]
    texts = [v for v in values if isinstance(v, str | bytes)]
    budget = current_budget()
    if name in ("center", "ljust", "rjust", "zfill"):
        budget.spend(max([0, *numbers]))
    elif name == "expandtabs":
        budget.spend(len(text) * max([8, *numbers]))
    elif name == "indent":
        widest = max([4, *numbers, *map(len, texts)])
        budget.spend((len(text.splitlines()) + 1) * widest)
    elif name == "replace" and len(texts) == 2 and type(texts[0]) is type(text):
        budget.spend(text.count(texts[0]) * len(texts[1]))  # type: ignore[arg-type]
    elif name == "join" and args:
        items = list(args[0])
        price_join(len(text), items)
        return (items, *args[1:])
    elif name in ("format", "format_map"):
        price_format(text, values)
    elif name == "translate":
        raise SecurityError("translate is not available to chat templates")
    return args


def price_join(separator_length: int, items: list[Any]) -> None:
    """Pay for joining items with a separator."""
    current_budget().spend_on(items)
    current_budget().spend(len(items) * separator_length)


def price_format(form: str | bytes, values: Iterable[object]) -> None:
    """Pay for formatting, and refuse field widths of more than five digits or given where they cannot be seen."""
    text = form if isinstance(form, str) else form.decode("latin-1")
    if re.search(r"\d{6}", text) or re.search(r"\{[^{}]*\{", text.replace("{{", "")):
        raise SecurityError("it formats with a field width that is too large or computed")
    current_budget().spend_on(form)
    for value in values:
        if "*" in text:
            check_number(value)
        current_budget().spend_on(value)


def check_number(value: object) -> None:
    """Refuse a number too large to be a width, an indent or a count."""
    if isinstance(value, int) and abs(value) > _MAX_ARGUMENT:
        raise SecurityError(f"it passes {value} as an argument, more than {_MAX_ARGUMENT}")
