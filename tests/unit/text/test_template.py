"""Chat templates: as transformers renders them, and within bounds."""

from __future__ import annotations

import json
import re
import tracemalloc
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import render_jinja_template

from minisgl_backend.errors import ConfigError, InvalidRequest
from minisgl_backend.text.sandbox import Sandbox
from minisgl_backend.text.template import ChatTemplate
from tests.fakes import chat_templates

CHATML = """{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{% endif %}
{% endfor %}"""

TOOLS = """{% macro shown(tool) %}
  <tool>{{ tool | tojson }}</tool>
{% endmacro %}
{% if tools %}
{% for tool in tools %}{{ shown(tool) }}{% endfor %}
{% endif %}
{% set ns = namespace(count=0) %}
{% for message in messages %}
{% set ns.count = ns.count + 1 %}
{% if message.role == 'tool' %}{% continue %}{% endif %}
{{ ns.count }}: {{ message.content | default('-', true) }}
{% for call in message.tool_calls or [] %}
{{ call.function.name }} {{ call.function.arguments | tojson(indent=2) }}
{% endfor %}
{% endfor %}"""

PARTS = """{% for message in messages %}{% if message.content is string %}{{ message.content }}
{% else %}{% for part in message.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"""

CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": " Où? <b>日本</b> 🎉 "},
    {"role": "assistant", "content": "Là."},
    {"role": "user", "content": "ok"},
]
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "look", "arguments": {"where": "<é>"}}}],
    },
    {"role": "tool", "content": "rain"},
]
THOUGHT: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    *(
        {"role": "assistant", "content": "b", name: f"by {name}"}
        for name in ("reasoning_content", "reasoning", "thinking")
    ),
    {"role": "assistant", "content": "b", "thinking": "t", "reasoning_content": "r"},
]
THOUGHTS = """{% for message in messages %}
{{ message.thinking | default('-') }} {{ message.reasoning_content | default('-') }}|{% endfor %}"""
PARTED: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
]
TOOL = {"type": "function", "function": {"name": "look", "description": "<&> é"}}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def template(source: str, **bounds: Any) -> ChatTemplate:
    return ChatTemplate(source, TOKENS, **{"max_chars": 10**6, **bounds})


@pytest.mark.parametrize(
    ("source", "chat", "tools"),
    [
        (CHATML, CHAT, None),
        (CHATML, [{"role": "system", "content": "x"}, *CHAT], None),
        (LLAMA, CHAT, None),
        (TOOLS, CALLS, [TOOL, TOOL]),
        (TOOLS, CALLS, None),
        (PARTS, PARTED, None),
        (PARTS, CHAT, None),
        (THOUGHTS, THOUGHT, None),
    ],
)
def test_as_transformers_does(
    source: str, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    options: dict[str, Any] = {"tools": tools, "add_generation_prompt": True, **TOKENS}
    expected: Any = render_jinja_template([chat], chat_template=source, **options)
    assert template(source).render(chat, tools) == expected[0][0]


@pytest.mark.parametrize("empty", [[], None])
def test_an_answer_without_calls_has_no_empty_list_of_calls(empty: list[Any] | None) -> None:
    """Clients send answers back with all their fields. Llama's templates refuse, and Mistral's
    write down, calls that are there but empty."""
    told = template(
        "{% for message in messages %}"
        "{% if 'tool_calls' in message %}{{ raise_exception('one call only') }}{% endif %}"
        "{{ message.content }}{% endfor %}"
    )
    assert told.render([{"role": "assistant", "content": "b", "tool_calls": empty}]) == "b"


def test_variables() -> None:
    thinking = template("{{ messages[1].content }}{% if not enable_thinking %} ok{% endif %}")
    assert thinking.render(CHAT, None, {"enable_thinking": True, "other": [1]}) == "Là."
    assert thinking.render(CHAT, None, {"enable_thinking": False}) == "Là. ok"
    assert thinking.render(CHAT) == "Là. ok"


def test_documents() -> None:
    """Templates of Granite present them to the model; all templates know the variable."""
    told = template("{% if documents is none %}none{% else %}{{ documents[0].text }}{% endif %}")
    assert told.render(CHAT) == "none"
    assert told.render(CHAT, None, {"documents": [{"text": "a"}]}) == "a"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "bos_token", "a b", ""])
def test_variables_that_are_ours(name: str) -> None:
    with pytest.raises(InvalidRequest, match="chat_template_kwargs may not hold '"):
        template("{{ messages }}").render(CHAT, None, {name: 1})


def test_a_template_of_strings_gets_parts_as_one() -> None:
    assert "<|im_start|>user\na\nb<|im_end|>" in template(CHATML).render(PARTED)


PARTS_OF_USERS = """{% for message in messages %}
    {%- if message.role == 'user' and message.content is not string %}
        {%- for part in message.content %}{{ '[' + part.text + ']' }}{% endfor %}
    {%- elif message.role == 'system' and message.content is not string %}
        {{- message.content[0].text }}
    {%- else %}{{ message.content | string }}{% endif %}{{ '|' }}
{%- endfor %}"""


def test_only_roles_whose_parts_a_template_shows_are_given_any() -> None:
    """This template takes the first part of a system message, and writes those of a tool as Python
    does."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": parts},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": parts, "tool_calls": [call]},
        {"role": "tool", "content": parts, "tool_call_id": "call00001"},
        {"role": "tool", "content": [], "tool_call_id": "call00001"},
    ]
    assert template(PARTS_OF_USERS).render(chat) == "a\nb|[a][b]|a\nb|a\nb||"


@pytest.mark.parametrize("role", ["developer", "function", "ipython"])
def test_rarer_roles_get_parts_from_a_template_that_takes_nothing_else(role: str) -> None:
    source = """{% for message in messages %}
        {%- for part in message.content %}{{ '[' + part.text | default('') + ']' }}{% endfor %}
    {%- endfor %}"""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template(source).render([{"role": role, "content": parts}]) == "[a][b]"


_CALLS_ALONE = """{% for message in messages %}{{ message.role + ':' }}
    {%- if message.role == 'assistant' %}CONTENT
        {%- for call in message.tool_calls %}{{ '+' + call.function.name }}{% endfor %}
    {%- else %}{{ message.content }}{% endif %}{{ '|' }}{% endfor %}"""


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("{{ message.content.split('</think>')[-1] }}", ""),  # QwQ, the first template of Qwen3
        ("{{ 'x' if '</think>' in message.content }}", ""),
        ("{{ message.content | trim }}", ""),  # GLM-4.5: None
        ("{{ message.content | tojson }}", '""'),
        ("{{ 'none' if message.content is none else 'text' }}", "none"),  # DeepSeek-R1-Distill
    ],
)
@pytest.mark.parametrize("given", [{"content": None}, {}])
def test_calls_without_a_text(content: str, shown: str, given: dict[str, Any]) -> None:
    """Clients send calls back with null as their content; a template gets it only if it can."""
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", **given, "tool_calls": [call]}]
    rendered = template(_CALLS_ALONE.replace("CONTENT", content)).render(chat)
    assert rendered == f"user:a|assistant:{shown}+f|"


def test_the_date() -> None:
    rendered = template("{{ strftime_now('%Y-%m-%d') }}").render(CHAT)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", rendered)


def test_a_template_may_refuse_a_chat() -> None:
    with pytest.raises(InvalidRequest, match=r"refuses the messages: roles must alternate$"):
        template(LLAMA).render(CHAT[1:])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception('') }}",
        "{{ lipsum.__globals__ }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% include 'x' %}",
    ],
)
def test_whatever_a_template_raises_is_one_sentence(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^the chat template ") as caught:
        template(source).render(CHAT)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


class Ticking:
    """A clock that advances a second whenever it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(90) }}",
        "{% macro m() %}{{ caller() }}{% endmacro %}"
        "{% for a in range(99) %}{% call m() %}x{% endcall %}{% endfor %}",
    ],
)
def test_time_is_bounded(source: str) -> None:
    with pytest.raises(InvalidRequest, match="runs longer than 50 s"):
        template(source, max_seconds=50, clock=Ticking()).render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(9999) %}0123456789{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * [1] }}",
        "{{ 2 ** (10**6) }}",
        "{{ (10**30) ** 2 }}",
        "{% set ns = namespace(x='0123456789') %}"
        "{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='0123456789') %}"
        "{% for a in range(99) %}{% set ns.x = ns.x ~ 1 ~ ns.x %}{% endfor %}",
        "{% set a = 'x' * 999 %}{% for i in range(99) %}{% set b = a ~ a ~ a ~ a ~ a ~ a ~ a"
        " ~ a ~ a ~ a ~ a %}{% endfor %}",
        "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='0123456789') %}"
        "{% for a in range(99) %}{% set ns.x = twice(ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='0123456789') %}{% for a in range(99) %}"
        "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}{% endfor %}",
        "{% set x %}{% for a in range(9999) %}0123456789{% endfor %}{% endset %}",
        "{% set x %}{% for a in range(9999) %}{% if a %}0123456789{% endif %}{% endfor %}"
        "{% endset %}",
        "{{ 'x'.center(10**9) }}",
        "{{ 'x'.ljust(width=10**9) }}",
        "{{ 'x' | center(10**9) }}",
        "{{ '\t'.expandtabs(10**9) }}",
        "{{ ('a' * 9999).replace('a', 'b' * 9999) }}",
        "{{ ('a' * 9999) | replace('a', 'b' * 9999) }}",
        "{{ ('a' * 9999) | replace('', 'b' * 9999) }}",
        "{{ ('a' * 9999).join(range(9999)) }}",
        "{{ range(9999) | join('a' * 9999) }}",
        "{{ range(9999) | join(d='a' * 9999) }}",
        "{{ 'a'.translate({97: 'b' * 9999}) }}",
        "{{ ('a\n' * 4999) | indent(9999) }}",
        "{{ ('a\n' * 4999) | indent('b' * 9999) }}",
        "{{ ('\t' * 9999).expandtabs(9999) }}",
        "{{ 1.5 | round(10**9, 'ceil') }}",
        "{{ [1] | batch(10**9, 'x') | list }}",
        "{{ [1] | slice(10**9) | list }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%.*f' % (10**9, 1) }}",
        "{{ '%-*d' | format(10**9, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**9) }}",
        "{{ '{:{}}'.format(1, '1' + '000000000') }}",
        "{{ '{b:{a[0]}}'.format_map({'b': 1, 'a': [10**9]}) }}",
        "{% set wide = '{:1000000000}'.format %}{{ wide(1) }}",
        "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
        "{{ messages | tojson(indent=1000) }}",
        "{{ messages | tojson(indent='x' * 1000) }}",
        "{{ 'x'.encode() * 10**9 }}",
        "{{ range(9999) | list | pprint }}",
    ],
)
def test_size_is_bounded(source: str) -> None:
    bounded = template(source, max_chars=10**4)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match=r"^the chat template (makes|computes|may not)"):
            bounded.render(CHAT)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 10**7, "it was made before it was refused"


def test_arithmetic_within_bounds() -> None:
    assert template("{{ 2 ** 10 }}{{ 'ab' * 2 }}{{ 3 * 4 }}{{ 'a' + 'b' }}").render(CHAT) == (
        "1024abab12ab"
    )


def test_operations_within_bounds() -> None:
    """Operations that the sandbox watches give the same results as in plain Jinja."""
    source = (
        "{{ 1 ~ 'a' ~ none ~ 2.5 }} {{ ['a', 1] | join('-') }} {{ ', '.join(['a', 'b']) }}"
        " {{ 'a b'.replace('a', 'c') }} {{ 'aa' | replace('a', 'b', 1) }} {{ '%05d' % 42 }}"
        " {{ '{:>4}'.format('x') }} {{ 'x' | center(5) }} {{ [3, 1] | sort | join }}"
        " {{ [{'n': 1}, {'n': 2}] | map(attribute='n') | join('+') }} {{ none }}"
        " {{ {'a': [1]} | tojson(indent=2) }} {{ 'a\nb' | indent(2) }} {{ [1] | first }}"
    )
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = lambda value, indent: json.dumps(value, indent=indent)
    assert template(source).render(CHAT) == plain.from_string(source).render()


@pytest.mark.parametrize("number", [9, 2**31])
@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].n | tojson }}",
        "{{ messages[0].n | string }}",
        "{{ messages[0].n | int }}",
        "{{ '{}%, *{{ {} }}*'.format(messages[0].n, messages[0].n) }}",
        "{{ '%s *' % messages[0].n }}",
        "{{ '%d' | format(messages[0].n) }}",
    ],
)
def test_a_number_that_is_shown_is_no_size(source: str, number: int) -> None:
    bounded = template(source, max_chars=10**4)
    assert str(number) in bounded.render([{"role": "user", "content": "a", "n": number}])


@pytest.mark.parametrize("number", [9, 2**31])
@pytest.mark.parametrize(
    "name",
    [
        name
        for name, source in vars(chat_templates).items()
        if not name.startswith("_") and "arguments" in str(source)
    ],
)
def test_arguments_of_calls_may_be_any_numbers(name: str, number: int) -> None:
    source = getattr(chat_templates, name)
    call = {"name": "f", "arguments": {"a": number}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_plan": "p",
            "tool_calls": [{"id": "call00001", "type": "function", "function": call}],
        },
        {"role": "tool", "content": "b", "name": "f", "tool_call_id": "call00001"},
    ]
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    function = {"name": "f", "description": "d", "parameters": parameters}
    tool = {"type": "function", "function": function}
    assert str(number) in template(source, max_chars=10**4).render(chat, [tool])


def test_a_template_that_does_not_compile_fails_the_load() -> None:
    with pytest.raises(ConfigError, match="the chat template does not compile"):
        template("{% for %}")


def test_the_sandbox_is_jinjas_immutable_one() -> None:
    assert issubclass(Sandbox, ImmutableSandboxedEnvironment)


def test_what_clients_send_is_not_a_program() -> None:
    chat = [{"role": "user", "content": "{{ 1 + 1 }}{% for %}"}]
    assert "{{ 1 + 1 }}{% for %}" in template(CHATML).render(chat)
    assert json.dumps("{{") in template("{{ messages | tojson }}").render(
        [{"role": "user", "content": "{{"}]
    )
