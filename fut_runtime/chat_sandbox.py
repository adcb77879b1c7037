"""The Jinja environment in which chat templates run: what transformers offers them, in a sandbox with a budget.

A chat template is a program that came with somebody's model. Jinja's sandbox keeps it from Python; it does not keep it
from looping for ever or from asking for a terabyte of spaces. So the syntax tree is rewritten to count: loop turns,
calls and every character of text cost from one budget, and operations that can multiply a text are priced before they
run. The budget is generous: templates of real models use a thousandth of it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn, cast

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from fut_runtime.chat_budget import (
    STEP,
    check_number,
    current_budget,
    price_format,
    price_join,
    price_text_operation,
)

#: Filters no chat template needs, and whose cost is hard to foresee.
_WITHOUT_FILTERS = ("pprint", "urlize", "wordwrap", "xmlattr")
_MAX_INTEGER_BITS = 4096
#: Names of the filters that count. They are no identifiers, so that no template can write them.
_EMIT, _CONCAT, _TURNS, _COMPARED = "fut emit", "fut concat", "fut turns", "fut compared"


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it is its contents."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class TemplateNamespace(Namespace):
    """Jinja's namespace without attributes that could stand for Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # like Jinja's, so that namespace(self=…) works
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it in templates: no HTML escapes, non-ASCII characters as they are."""
    if isinstance(indent, int) and indent > 64:
        raise SecurityError(f"it asks for tojson(indent={indent}), more than 64")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: object) -> NoReturn:
    """How a template refuses a conversation."""
    raise TemplateError(str(message))


def strftime_now(form: str) -> str:
    """Local time now, in the given format."""
    if len(form) > 200 or re.search(r"%[-_0^#+]*\d", form):
        raise SecurityError("it gives strftime_now a format that is too long or has a field width")
    return datetime.now().strftime(form)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Block trimming, loop controls, filters and globals as transformers gives them to chat templates."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock])
        self.filters["tojson"] = to_json
        for name in _WITHOUT_FILTERS:
            del self.filters[name]
        for name, function in list(self.filters.items()):
            self.filters[name] = _priced_filter(name, function)
        self.filters.update({_EMIT: _emit, _CONCAT: _concat, _TURNS: _turns, _COMPARED: _compared})
        self.globals.clear()
        self.globals.update(
            range=_bounded_range,
            dict=_make_dict,
            namespace=TemplateNamespace,
            cycler=Cycler,
            joiner=Joiner,
            raise_exception=raise_exception,
            strftime_now=strftime_now,
        )

    def compile_budgeted(self, source: str) -> Callable[[Mapping[str, Any]], str]:
        """A function that renders the template with given variables. Run both through `render_within`."""
        return self.from_string(_Budgeted().visit(self.parse(source))).render

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function, a macro or a method, priced first."""
        current_budget().spend(STEP)
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes):
            args = price_text_operation(method.__name__, owner, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str):
            current_budget().spend(len(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `+`, `*`, `%` or `**`, priced first."""
        if operator == "%" and isinstance(left, str | bytes):
            price_format(left, right if isinstance(right, tuple) else (right,))
        elif isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_INTEGER_BITS:
                raise SecurityError("it computes an integer of more than a thousand digits")
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if hasattr(sequence, "__len__") and isinstance(count, int):
                    current_budget().spend(len(sequence) * max(0, count))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            current_budget().spend(len(left) + len(right))
        return super().call_binop(context, operator, left, right)


class _Budgeted(NodeTransformer):
    """Puts a price on loops, output, `~` and comparisons."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (the visitor's protocol)
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _TURNS)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_filtered(_as_constant(child), _EMIT) for child in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filtered(node.expr, _COMPARED)
        return node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


def _as_constant(node: nodes.Node) -> nodes.Node:
    """Literal text as a constant, which may be filtered; what else is put out is an expression already."""
    return nodes.Const(node.data, lineno=node.lineno) if isinstance(node, nodes.TemplateData) else node


# A filter that takes the context is never run by the compiler: a text pays each time it is put out, not once.
@pass_context
def _emit(_: Context, value: object) -> str:
    current_budget().spend_on(value)
    return str(value)


@pass_context
def _concat(_: Context, values: list[object]) -> str:
    current_budget().spend_on(values)
    return "".join(map(str, values))


@pass_context
def _turns(_: Context, values: Iterable[Any]) -> Iterator[Any]:
    budget = current_budget()
    for value in values:
        budget.spend(STEP)
        yield value


@pass_context
def _compared(_: Context, value: Any) -> Any:
    if not isinstance(value, str | bytes):
        current_budget().spend_on(value)
    return value


def _priced_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with its input, its growth and its output paid; the wrapper keeps Jinja's marks on the function."""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def priced(*args: Any, **kwargs: Any) -> Any:
        budget = current_budget()
        leading, value, rest = args[:skip], args[skip], args[skip + 1 :]
        budget.spend_on(value)
        for argument in (*rest, *kwargs.values()):
            check_number(argument)
        if name == "join":
            value = list(value)
            price_join(len(str(rest[0] if rest else kwargs.get("d", ""))), value)
        elif isinstance(value, str | bytes):
            rest = price_text_operation(name, value, rest, kwargs)
        elif name == "sum" and not isinstance(kwargs.get("start", rest[1] if len(rest) > 1 else 0), int | float):
            raise SecurityError("it sums what are no numbers")
        result = function(*leading, value, *rest, **kwargs)
        if isinstance(result, str):
            budget.spend(len(result))
        return result

    return priced


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not have an attribute {name!r}, which begins with an underscore")


def _bounded_range(*args: int) -> range:
    values = range(*args)
    if len(values) > 100_000:
        raise SecurityError(f"it asks for a range of {len(values)} numbers")
    return values


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)
