"""Chat templates: rendered as transformers does, and harmless when hostile."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from fut_runtime.chat import ChatTemplate, ChatTemplateError
from small_tokenizers import CHATML, byte_level_raw

USER = [{"role": "user", "content": "Hi"}]
CONVERSATION = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": "Hi <b> & é 😀"},
    {"role": "assistant", "content": "Hello.", "tool_calls": [{"name": "f", "arguments": {"x": [1, None, "é<"]}}]},
    {"role": "user", "content": "Bye "},
]
TOKENS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}

# What templates of real models do: trimming, loop controls, namespaces, macros, tojson, string methods, tests, slices.
TEMPLATES = {
    "chatml": CHATML,
    "llama": (
        "{{- bos_token }}\n"
        "{%- if messages[0]['role'] == 'system' %}\n"
        "    {%- set system_message = messages[0]['content'] | trim %}\n"
        "    {%- set messages = messages[1:] %}\n"
        "{%- else %}\n    {%- set system_message = '' %}\n{%- endif %}\n"
        "{%- for message in messages %}\n"
        "    {{- '[' + message.role ~ ':' ~ loop.index0 + ']\n' + message['content'] | trim + eos_token }}\n"
        "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '[assistant]\n' }}\n{%- endif %}\n"
    ),
    "tools": (
        "{%- macro show(call) -%}{{ call.name }}({{ call.arguments | tojson }}){%- endmacro -%}\n"
        "{% set ns = namespace(last=-1, seen=false) %}\n"
        "{% for m in messages[::-1] %}{% if m.role == 'user' and not ns.seen %}{% set ns.last = loop.index0 %}"
        "{% set ns.seen = true %}{% endif %}{% endfor %}\n"
        "{{ ns.last }} {{ tools | tojson(indent=2) if tools else 'no tools' }}\n"
        "{% for m in messages if m.role != 'system' %}\n"
        "  {% if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ show(c) }}{% endfor %}"
        "{% continue %}{% endif %}\n"
        "  {{ m.content.strip().split(' ')[0] | upper }}{{ loop.length }}{{ ',' if not loop.last }}\n"
        "{% endfor %}\n"
        "{% for k, v in messages[0].items() %}{{ k }}={{ v | length }};{% endfor %}{{ undefined_name }}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "text": (
        "{% set parts %}{% for m in messages %}{{ m.content | replace('i', '1') }}|{% endfor %}{% endset %}"
        "{{ parts }}{{ ['a', 'b'] | join('-') }}{{ '%s=%d' % ('n', 3) }}{{ 'x' * 3 }}{{ 'ab'.replace('a', 'c') }}"
        "{{ '-'.join(['p', 'q']) }}{{ 'a\nb' | indent(2) }}{{ 2 ** 5 }}{{ range(3) | list }}{{ 'é' | tojson }}"
        "{{ {'a': 1}['a'] + 1 }}{{ messages | map(attribute='role') | unique | list }}{{ dict(a=1) }}{{ none }}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generation_prompt", [True, False])
def test_rendering_equals_that_of_transformers(name: str, generation_prompt: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level_raw(), **TOKENS)
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "description": "é <"}}]
    for messages in (CONVERSATION, CONVERSATION[1:2]):
        for given in (None, tools):
            expected = theirs.apply_chat_template(
                messages,
                chat_template=TEMPLATES[name],
                tools=given,
                add_generation_prompt=generation_prompt,
                tokenize=False,
            )
            ours = ChatTemplate(TEMPLATES[name], TOKENS)
            assert ours.render(messages, add_generation_prompt=generation_prompt, tools=given) == expected


def test_smollm2_template(smollm2_dir: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from fut_runtime.tokenizer import Tokenizer

    theirs = transformers.AutoTokenizer.from_pretrained(smollm2_dir)
    ours = Tokenizer.from_directory(smollm2_dir)
    for messages in (CONVERSATION, USER):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert ours.encode_chat(messages) == expected


def test_strftime_now() -> None:
    text = ChatTemplate("{{ strftime_now('%d %b %Y') }}").render(USER)
    assert re.fullmatch(r"\d\d \w+ \d{4}", text)


def test_a_template_may_refuse() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="refuses this conversation: roles must alternate"):
        template.render(USER)


@pytest.mark.parametrize(
    "messages", [["Hi"], [{"content": "Hi"}], [{"role": 3, "content": "Hi"}], [{"role": "user"}]], ids=str
)
def test_messages_are_checked(messages: list[Any]) -> None:
    with pytest.raises(ChatTemplateError, match="message 0"):
        ChatTemplate(CHATML).render(messages)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "broken in line 1"),
        ("{{ messages | nonsense }}", "broken in line 1"),
        ("{% include 'x' %}", "failed"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ nothing.more }}", "'nothing' is undefined"),
        ("x" * 200_001, "more than 200000"),
    ],
)
def test_broken_templates(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source).render(USER)


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['re'] }}",
    "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
    "{{ ''['format']('{0.__class__.__mro__}', '') or '{0.__class__}'.format(messages) }}",
    "{{ '{0.__class__.__init__.__globals__}' | format(messages) }}{{ '{0.__class__}'.format_map({'0': 1}) }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ (messages | attr('__class__')).__base__ }}",
    "{{ self._TemplateReference__context.environment.filters }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}{{ ns }}",
    "{{ messages.append(1) }}{{ messages.clear() }}",
    "{{ dict.__subclasses__() }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_reach_python(source: str) -> None:
    template = ChatTemplate(source)
    messages = [dict(USER[0])]
    try:
        text = template.render(messages)
    except ChatTemplateError:
        text = ""
    assert not re.search(r"class|module|function|built|os\b", text)
    assert messages == USER


def grow(step: str, s: str = "'x'") -> str:
    """A template that repeats `step` on a namespace n."""
    return "{% set n = namespace(s=" + s + ", t=" + s + ") %}{% for i in range(99) %}" + step + "{% endfor %}"


BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "literal output": "{% set t %}{% for a in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endset %}",
    "constant": "{{ 'x' * 9999999999 }}",
    "constant filter": "{{ 'x' | center(9999999999) }}",
    "doubling": grow("{% set n.s = n.s ~ n.s %}"),
    "doubling by plus": grow("{% set n.s = n.s + n.s %}"),
    "doubling by join": grow("{% set n.s = [n.s, n.s] | join %}"),
    "doubling by join method": grow("{% set n.s = n.s.join(['a'] * 9) %}"),
    "doubling by replace": grow("{% set n.s = n.s.replace('x', 'xx') %}"),
    "doubling by capture": grow("{% set t %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = t %}"),
    "doubling by macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "doubling lists": grow("{% set n.s = n.s + n.s %}", s="[1]"),
    "shared lists": grow("{% set n.s = [n.s, n.s] %}", s="[1]") + "{{ n.s }}",
    "shared lists in a namespace": grow("{% set n.s = [n.s, n.s] %}", s="[1]") + "{{ n }}",
    "shared lists compared": grow("{% set n.s = [n.s, n.s] %}{% set n.t = [n.t, n.t] %}", s="[1]") + "{{ n.s == n.t }}",
    "shared lists as JSON": grow("{% set n.s = [n.s, n.s] %}", s="[1]") + "{{ n.s | tojson }}",
    "range": "{{ range(999999999) | list }}",
    "power": "{{ 9 ** 9999999 }}",
    "repeated squaring": grow("{% set n.s = n.s * n.s %}", s="9"),
    "padding": "{{ 'x'.ljust(9999999999) }}",
    "percent width": "{{ '%9999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (9999999999, 1) }}",
    "format width": "{{ '{:9999999999}'.format('x') }}",
    "computed format width": "{{ '{:{w}}'.format('x', w=9999999999) }}",
    "format filter": "{{ '%9999999999d' | format(1) }}",
    "indent": "{{ 'x' | indent(9999999999) }}",
    "JSON indent": "{{ messages | tojson(indent=9999) }}",
    "list repetition": "{{ [1] * 9999999999 }}",
    "sum of lists": "{{ ([range(9999) | list] * 9999) | sum(start=[]) }}",
    "date": "{{ strftime_now('%9999999999d') }}",
    "deep macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep source": "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
    "long sum": "{{ 1" + " + 1" * 49999 + " }}",
    "slow loop": "{% set r = range(99999) | list %}{% for a in r %}{% if -1 in r %}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_cannot_exhaust_the_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fut_runtime.chat_budget.SECONDS", 1.0)
    start = time.monotonic()
    with pytest.raises(ChatTemplateError):
        ChatTemplate(BOMBS[name]).render(USER)
    assert time.monotonic() - start < 60


def test_a_long_conversation_is_within_the_budget() -> None:
    messages = [{"role": "user", "content": "words " * 20_000}] * 20
    assert len(ChatTemplate(TEMPLATES["llama"], TOKENS).render(messages)) > 2_000_000
