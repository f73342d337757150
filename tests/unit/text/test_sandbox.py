"""The sandbox of templates: what would be too large is never made, and the rest is as in Jinja."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from typing import Any

import pytest
from jinja2 import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minisgl_backend.text.sandbox import Meter, Sandbox
from minisgl_backend.text.sandbox_sizes import OutOfBounds
from tests.unit.text.test_template import Ticking

MAX_SIZE = 10**4
LONG = "('a' * 9999)"
LINES = "('\\r' * 9999)"
MANY = f"([{LONG}] * 9999)"
"""A list that is small, but whose text is not."""
NESTED = "(((" + 3 * "[" + "[1]" + 3 * "] * 99" + ")))"
"""Lists in lists, each many times."""


def to_json(value: Any, **how: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **how})


def rendered(source: str, **variables: Any) -> str:
    sandbox = Sandbox(MAX_SIZE, {"tojson": to_json})
    meter = Meter(time.monotonic, 60.0, 4 * MAX_SIZE)
    return str(sandbox.compiled(source).render({sandbox.meter_name: meter, **variables}))


@pytest.mark.parametrize(
    "source",
    [
        # a text of what holds a large string many times
        f"{{{{ {MANY} }}}}",
        f"{{{{ {MANY} ~ 1 }}}}",
        f"{{{{ [{MANY}] * 99 ~ 1 }}}}",
        f"{{{{ {{'a': {MANY}}}.values() }}}}",
        f"{{{{ {{'a': {MANY}}}.items() }}}}",
        f"{{{{ {{'a': {MANY}}}.items().mapping }}}}",
        f"{{{{ namespace(a={MANY}) }}}}",
        f"{{{{ {MANY} | string }}}}",
        f"{{{{ {MANY} | safe }}}}",
        f"{{{{ {MANY} | trim }}}}",
        f"{{{{ {MANY} | upper }}}}",
        f"{{{{ {MANY} | wordcount }}}}",
        f"{{{{ {MANY} | tojson }}}}",
        f"{{{{ {MANY} is lower }}}}",
        f"{{{{ {MANY} | join }}}}",
        f"{{{{ [{MANY}] | join }}}}",
        f"{{{{ [1, 2] | join({MANY}) }}}}",
        f"{{{{ ''.join({MANY}) }}}}",
        f"{{{{ 'a' | replace({MANY}, 'b') }}}}",
        f"{{{{ {MANY} | replace('b', 'c') }}}}",
        f"{{{{ '%s' % [{MANY}] }}}}",
        f"{{{{ '%r' % [{MANY}] }}}}",
        f"{{{{ '%a' % [{MANY}] }}}}",
        f"{{{{ '%(a)s' % {{'a': {MANY}}} }}}}",
        f"{{{{ '%s' | format({MANY}) }}}}",
        f"{{{{ '%(a)s' | format(a={MANY}) }}}}",
        f"{{{{ '{{}}'.format({MANY}) }}}}",
        f"{{{{ '{{!r:.3}}'.format({MANY}) }}}}",
        f"{{{{ '{{a}}'.format_map({{'a': {MANY}}}) }}}}",
        f"{{{{ {MANY} | sort }}}}",
        f"{{{{ {MANY} | unique | list }}}}",
        f"{{{{ ([{{'a': {LONG}}}] * 9999) | groupby('a') }}}}",
        f"{{{{ dict([(1, {LONG}), (2, {LONG})]) | dictsort(by='value') }}}}",
        f"{{{{ {MANY} | map('upper') | list }}}}",
        "{% set ns = namespace(a=['a']) %}{% for i in range(99) %}"
        "{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a }}",
        "{% set ns = namespace(a=['a']) %}{% for i in range(99) %}"
        "{% set ns.a = {'a': ns.a, 'b': ns.a} %}{% endfor %}{{ ns.a | tojson }}",
        # spellings that are longer than the string
        "{{ ['\\0' * 9999] }}",
        "{{ ['\\0' * 9999] | tojson }}",
        "{{ '%r' % ('\\0' * 9999) }}",
        "{{ ['\U0001f600' * 9999] | tojson(ensure_ascii=true) }}",
        "{{ ('<' * 9999) | e }}",
        "{{ ('<' * 9999) | escape }}",
        "{{ ('a' | safe) + '<' * 9999 }}",
        "{{ ('a' | safe).replace('a', '<' * 9999) }}",
        f"{{{{ (('<' * 2000) | safe).replace('<', {LONG}) }}}}",
        "{{ ('<' * 9999) | truncate(9990, true, 'a' | safe) }}",
        "{{ ('<' * 9999) | indent('a' | safe, blank=true) }}",
        "{{ ('%s' | safe) | format('<' * 9999) }}",
        "{{ ('a' | safe).join(['<' * 9999, '<' * 9999]) }}",
        "{{ ('%s' | safe) % ('<' * 9999) }}",
        "{{ ('{}' | safe).format('<' * 9999) }}",
        "{{ ('ΐ' * 9999).upper() }}",
        "{{ ('ΐ' * 9999) | upper }}",
        # arguments of any kind, under any name
        f"{{{{ {LONG} | replace(old='a', new={LONG}) }}}}",
        f"{{{{ {LONG} | replace(new={LONG}, old='a') }}}}",
        f"{{{{ {LONG} | replace('a', new={LONG}, count=9999) }}}}",
        f"{{{{ ('1' * 9999) | replace(1, {LONG}) }}}}",
        f"{{{{ {LINES} | indent({LONG}) }}}}",
        f"{{{{ {LINES} | indent(width=9999) }}}}",
        "{{ ('a\\x0b' * 4999) | indent(9999) }}",
        "{{ ('a\u2028' * 4999) | indent(9999, true) }}",
        f"{{{{ ('a ' * 4999) | wordwrap(1, wrapstring={LONG}) }}}}",
        f"{{{{ ('a.de ' * 1999) | urlize(target={LONG}) }}}}",
        f"{{{{ ('a.de ' * 1999) | urlize(rel={LONG}) }}}}",
        "{{ ('<' * 9999) | urlencode }}",
        f"{{{{ {{'a': {MANY}}} | xmlattr }}}}",
        f"{{{{ {MANY} | forceescape }}}}",
        "{{ ([[1] * 9999] * 999) | sum(start=[]) }}",
        "{{ [] | sum(start=[1] * 9999) + [1] * 9999 }}",
        "{{ [[[]]] | tojson(indent='x' * 9) }}",
        f"{{{{ {MANY} | tojson(indent=-100) }}}}",
        f"{{{{ [{NESTED}] | tojson(indent=-100) }}}}",
        f"{{{{ ([1, 2] * 999) | tojson(separators=({LONG}, ':')) }}}}",
        # bytes, and methods that are not known
        "{{ 'x'.encode().ljust(10**9) }}",
        "{{ (1).to_bytes(10**9, 'big') }}",
        "{{ true.to_bytes(10**9, 'big') }}",
        "{{ (1 | attr('to_bytes'))(10**9, 'big') }}",
        "{{ (1).from_bytes([1] * 9999, 'big') }}",
        f"{{{{ ('a' | safe).escape({MANY}) }}}}",
        # fields
        "{{ '%9999d' * 99 % ((1,) * 99) }}",
        "{{ '%.9999f' * 99 % ((1,) * 99) }}",
        "{{ '%9999%' * 99 % () }}",
        "{{ '%(a)9999d' * 99 % {'a': 1} }}",
        "{{ '%(a(b))999999999d' % {'a(b)': 1} }}",
        "{{ '%s' * 99 % (('a' * 999,) * 99) }}",
        "{{ '{:9999}' * 99 }}{{ ('{:9999}' * 99).format(*((1,) * 99)) }}",
        "{{ ('{0:9999}' * 99).format(1) }}",
        "{{ ('{0}' * 99).format('a' * 999) }}",
        "{{ '{:.99999999f}'.format(1.5) }}",
        "{{ '{:{}.{}}'.format(1.5, 1, 10**9) }}",
        # numbers
        "{% set ns = namespace(n=9) %}"
        "{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * 2 ** 64 %}"
        "{% endfor %}{% for i in range(9999) %}{% set ns.n = ns.n * 2 ** 64 %}{% endfor %}",
        "{{ 5 | round(10**9) }}",
        "{{ 5 | round(-10**9) }}",
        "{{ 5 | round(precision=10**9, method='floor') }}",
        "{{ ('f' * 9999) | int(0, 16) }}",
        "{{ [('f' * 9999) | int(0, 16)] }}",
    ],
)
def test_what_is_too_large_is_never_made(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(OutOfBounds, match=r"^(makes|computes|may not)"):
            rendered(source)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 3 * 10**6, "it was made before it was refused"


@pytest.mark.parametrize(
    "source",
    [
        "{{ '100%% * %d' % 3 }}",
        "{{ '{} of 10000 tokens'.format(3) }}",
        "{{ 'id 12345: %s' % x }}",
        "{{ '12345 %(x)s %(x)r' % {'x': x} }}",
        "{{ '%5.2f|%-5d|%+d|%x|%c|%5s|%.1s' % (1.5, 2, 3, 255, 'c', x, x) }}",
        "{{ '%s' % [1, 2] }}{{ '%s %s' % (x, none) }}{{ '%s' | format(x) }}",
        "{{ '%(name)s %(context)s' | format(context=1, name=2) }}",
        "{{ '{0:>5}{a:{width}.{digits}f}{{}}'.format(x, a=1.5, width=9, digits=2) }}",
        "{{ '{a.b[0]!r:>9}'.format_map({'a': {'b': ['c']}}) }}",
        "{{ '{:,}|{:_b}|{:x}'.format(10**9, 10**9, 255) }}",
        "{{ [1, 'a', {'b': (none, true, 1.5)}] }}{{ {'a': x}.items() }}{{ {'a': 1}.keys() }}",
        "{{ [nothing] }}{{ nothing }}{{ [range(3)] }}{{ range(3) | list }}",
        "{{ ['\\'\"' * 9, '\\0é'] }}",
        "{{ [1, {'a': [x, none]}] | tojson }}{{ [[1], {'a': []}] | tojson(indent=2) }}",
        "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}",
        "{{ [1, 2] | sum }}{{ [{'n': 1}] | sum('n') }}{{ [[1], [2]] | sum(start=[]) }}",
        "{{ [1, 2] | join }}{{ [{'n': 1}] | join(attribute='n') }}{{ 'abc' | join(d='-') }}",
        "{{ ('<a>' | safe) + '<b>' }}{{ '<a>' | e }}{{ ('<%s>' | safe) % '<' }}",
        "{{ [3, 1] | sort }}{{ [{'n': 'b'}, {'n': 'a'}] | sort(attribute='n', reverse=true) }}",
        "{{ [1, 1] | unique | list }}{{ [1, 2] | max }}{{ {'b': 1, 'a': 2} | dictsort }}",
        "{{ [{'n': 1}, {'n': 1}] | groupby('n') }}{{ [1, 2, 3] | batch(2, 'x') | list }}",
        "{{ [1, 2, 3] | slice(2) | list }}{{ 1.55 | round(1, 'floor') }}{{ 1.5 | round }}",
        "{{ x | replace('a', 'bc') }}{{ x | replace('a', 'b', 1) }}{{ x.replace('a', 'b', 1) }}",
        "{{ 'a\\nb' | indent }}{{ 'a\\nb' | indent('>', first=true, blank=true) }}",
        "{{ x.upper() }}{{ 'ÄB'.title() }}{{ 'a\\tb'.expandtabs() }}{{ x.center(9, '*') }}",
        "{{ '7'.zfill(3) }}{{ ' a b '.strip().split(' ') }}{{ 'ab'.startswith('a') }}",
        "{{ '-'.join(['a', 'b']) }}{{ ['a'] | map('upper') | list }}{{ 'A' is upper }}",
        "{{ 6 is divisibleby(num=3) }}{{ 'a' is in(['a']) }}{{ nothing is defined }}",
        "{{ [1, 2] | select('odd') | list }}{{ [{'a': 1}] | selectattr('a', 'eq', 1) | list }}",
        "{{ 2 ** 64 * 2 ** 64 }}{{ 3 * 'ab' }}{{ [1] * 2 }}{{ (1, 2) + (3,) }}{{ 7 % 4 }}",
        "{{ x | truncate(3, true, '') }}{{ x | string | length }}{{ '5' | int + 1 }}",
        "{{ y - 1 }}{{ 1 - y }}{{ y - y * 2 - y }}{{ y - 0.5 - y }}{{ 3 - 1 }}{{ -y }}",
        "{{ 1 < 2 < 3 }}{{ 3 > 2 > 2 }}{{ x == x != y in [y] }}{{ x in x in [x] }}",
        "{{ x in (x, y) }}{{ y not in {x: 1, y: 2} }}{{ x in {x: 1}.keys() }}{{ {x: 1}[x] }}",
        "{{ x in ([x, y] | reverse) }}{{ y in ([x] | map('upper')) }}{{ 3 in range(5) }}",
        "{{ [x, [y]] == [x, [y]] }}{{ [1] < [2] }}{{ (x, 1) in {(x, 1): 2} }}{{ [x].index(x) }}",
        "{{ {'a': 1} is eq {'a': 1} }}{{ x is in {x: 1} }}{{ {x: 1}.get(x, [y]) }}{{ y == none }}",
        "{{ dict([(x, 1)])[x] }}{{ [{'a': 1}, {}] | groupby('a', default=0) }}{{ [1, 2, 3][1:] }}",
        "{% for i in [[1], [1], [2]] %}{{ loop.changed(i) }}{{ loop.changed(i, x) }}{% endfor %}",
        "{% for i in range(9) if i is odd %}{{ i }}{{ loop.index }}{% endfor %}",
        "{% for i in [[1], [[2], 3]] if i recursive %}{{ loop(i) if i is iterable else i }}"
        "{% else %}x{% endfor %}",
        "{% filter upper %}a{{ x }}{% endfilter %}{{ x if x is string else 1 }}",
    ],
)
@pytest.mark.parametrize(
    "around",
    [
        "{}",
        "{{% for _ in [1, 2] %}}{}{{% endfor %}}",
        "{{% block a %}}{}{{% endblock %}}",
        "{{% macro a() %}}{}{{% endmacro %}}{{{{ a() }}}}",
    ],
    ids=["alone", "loop", "block", "macro"],
)
def test_all_else_is_as_in_jinja(source: str, around: str) -> None:
    """Jinja adds arguments to calls in loops and in blocks."""
    source = around.format(source)
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = to_json
    assert rendered(source, x="abcäa", y=2) == plain.from_string(source).render(x="abcäa", y=2)


@pytest.mark.parametrize(
    "source",
    [
        f"{{{{ {LONG} }}}}",
        f"{{{{ {LONG}.replace('a', 'b') ~ 'c' }}}}",
        f"{{{{ {LONG} | trim | upper | e | string }}}}",
        "{{ ('a' * 9990) | tojson }}",
        "{{ ['a' * 4990, 'a' * 4990] }}",
        "{{ ['a' * 4990, 'a' * 4990] | tojson }}",
        "{{ ['a' * 5000, 'a' * 4999] | join(' ') }}",
        "{{ '%s %(5)s'[:3] % ('a' * 9990) }}",
        "{{ '{}'.format('a' * 9990) }}",
    ],
)
def test_what_is_just_small_enough_is_made(source: str) -> None:
    assert 9980 < len(rendered(source)) <= MAX_SIZE


def test_numbers_of_clients_may_be_larger_than_those_of_templates() -> None:
    assert rendered("{{ n }}{{ n | tojson }}{{ n | abs }}", n=10**4000) == 3 * str(10**4000)


DOUBLED = (
    "{% set ns = namespace(x=['a'], y=['a'], t=('a',), u=('a',)) %}{% for i in range(40) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}"
    "{% set ns.t = (ns.t, ns.t) %}{% set ns.u = (ns.u, ns.u) %}{% endfor %}"
)
"""Small values that take days to be compared or hashed."""


@pytest.mark.parametrize(
    "expression",
    [
        "ns.x == ns.y",
        "ns.x != ns.y",
        "ns.x < ns.y",
        "ns.x >= ns.y",
        "1 < 2 == (ns.x == ns.y)",
        "ns.x in [ns.y]",
        "ns.x not in [ns.y]",
        "ns.x in [ns.y] == 1",
        "ns.x in ([ns.y] | reverse)",
        "n in ([ns.y] | reverse)",
        "ns.t in {}",
        "ns.x is eq ns.y",
        "ns.x is lessthan(ns.y)",
        "ns.x is in([ns.y])",
        "n is in([ns.y] | reverse)",
        "[ns.x] | select('eq', ns.y) | list",
        "[{'a': ns.x}] | selectattr('a', 'in', [ns.y]) | list",
        "[ns.x].index(ns.y)",
        "[ns.x].count(ns.y)",
        "(ns.x,).index(ns.y)",
        "([ns.x] | attr('count'))(ns.y)",
        "{}.get(ns.t)",
        "{}[ns.t]",
        "{ns.t: 1}",
        "dict([(ns.t, 1)])",
        "dict([(ns.t, 1)] | reverse)",
        "namespace([(ns.t, 1)])",
        "{}.keys() - [ns.t]",
        "[ns.t] - {}.keys()",
        "{'a': ns.t}.items() - []",
        "{'a': ns.t}.items() - 1",
        "'' - {'a': ns.t}.items()",
        "{}.keys().isdisjoint([ns.t])",
        "{}.keys().isdisjoint([ns.t] | reverse)",
        "{'a': ns.x}.items() == {'a': ns.y}.items()",
        "[{}] | map(attribute=ns.t) | list",
        "[{}, {}] | groupby('a', default=ns.t)",
        "[{}, {}] | groupby('a', ns.t, true)",
    ],
)
def test_what_takes_long_to_compare_is_not_compared(expression: str) -> None:
    with pytest.raises(OutOfBounds, match=r"^(makes|may not)"):
        rendered(DOUBLED + "{{ " + expression + " }}", n=0)


def test_what_changes_in_a_loop_is_compared_within_bounds() -> None:
    with pytest.raises(OutOfBounds):
        rendered(DOUBLED + "{% for x in [ns.x, ns.y] %}{{ loop.changed(x) }}{% endfor %}")


def test_long_values_are_compared_with_short_ones() -> None:
    """What clients send may be longer than what a template may make."""
    source = (
        "{{ m == 'a' }}{{ m == [] }}{{ 'role' in m }}{{ key in m }}{{ m[key] }}{{ m is mapping }}"
        "{{ m is sameas none }}{{ m.get(key) }}{{ dict(m, a=1)[key] }}{{ m.content in ['b', 'c'] }}"
    )
    message = {"content": ["a" * MAX_SIZE] * 9, "role": "user"}
    assert rendered(source, m=message, key="role") == (
        "FalseFalseTrueTrueuserTrueFalseuseruserFalse"
    )


class Once:
    """Tells how often it was read."""

    def __init__(self) -> None:
        self.num_reads = 0

    def __call__(self) -> int:
        self.num_reads += 1
        return self.num_reads


@pytest.mark.parametrize(
    ("comparison", "is_true", "num_reads"),
    [("a < n() < b", True, 1), ("b < a < n()", False, 0), ("a < n() in c == c", True, 1)],
)
def test_operands_of_a_chain_are_evaluated_once_and_only_if_needed(
    comparison: str, is_true: bool, num_reads: int
) -> None:
    n = Once()
    assert rendered("{{ " + comparison + " }}", n=n, a=0, b=2, c=[1]) == str(is_true)
    assert n.num_reads == num_reads


@pytest.mark.parametrize(
    "source",
    [
        "{{ range(9999) | map('string') | list }}",
        "{{ range(9999) | select('odd') | list }}",
        "{{ range(9999) | sum }}",
        "{% for i in range(9999) if false %}{% endfor %}",
        "{{ 'a' ~ 'b' in ((['c'] * 9999) | reverse) }}",
    ],
)
def test_time_is_bounded_wherever_a_list_is_gone_through(source: str) -> None:
    sandbox = Sandbox(MAX_SIZE, {})
    meter = Meter(Ticking(), 50.0, 4 * MAX_SIZE)
    with pytest.raises(OutOfBounds, match="runs longer than 50 s"):
        sandbox.compiled(source).render({sandbox.meter_name: meter})


def test_escapes_cannot_be_turned_on() -> None:
    with pytest.raises(TemplateSyntaxError, match="autoescape is not supported"):
        Sandbox(MAX_SIZE, {}).compiled("{% autoescape true %}{{ x }}{% endautoescape %}")


@pytest.mark.parametrize(
    "expression",
    [
        "a + b",
        "a * 3",
        "[a] * 30",
        "a ~ b ~ c",
        "[a, c] ~ ''",
        "c | string",
        "c.values() ~ ''",
        "c | tojson",
        "c | tojson(indent=3)",
        "c | tojson(indent=-100)",
        "c | tojson(indent=0, separators=('', ''))",
        "([inf, -inf, inf - inf] * 9) | tojson(separators=('', ''))",
        "{inf: inf, -inf: -inf, inf - inf: 1} | tojson(separators=('', ''))",
        "c | tojson(ensure_ascii=true)",
        "a | replace('é', b)",
        "a | replace(new=b, old='é', count=1)",
        "a.replace('', b)",
        "a | indent(7, true, true)",
        "a | indent(b)",
        "a | indent(-1000)",
        "a | e",
        "a.upper()",
        "a | title",
        "'x'.center(50)",
        "'x' | center",
        "'x'.zfill(50)",
        "'\ta\t'.expandtabs()",
        "[a, b, c] | join(b)",
        "b.join([a, b])",
        "'%9s %-90s %r %a' % (a, b, a, a)",
        "'%.50f %30d %x' % (1.5, 7, 2**64)",
        "'%e' % 1",
        "'%g %e %f' % (2**64, 2**64, 2**64)",
        "'%(a)s %(c)s' | format(a=a, c=c)",
        "'{:>90} {!r} {!a}'.format(b, a, a)",
        "'{:.50f} {:_b} {:,}'.format(1.5, 2**64, 2**64)",
        "'{:e}'.format(1)",
        "'{:%} {:e}'.format(1, 2**64)",
        "'{a} {c[key]}'.format_map({'a': a, 'c': c})",
        "(a | safe) + b",
        "('%s' | safe) % b",
        "('<' | safe).replace('<', b)",
        "[[1], [2]] | sum(start=[0])",
    ],
)
def test_what_is_predicted_is_as_large_as_what_is_made_and_not_much_larger(
    expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sandbox, "_checked", lambda _, value: value)
    monkeypatch.setattr(Sandbox, "_write", lambda *_: "")
    given = {"a": "é<\"'\n\0\U0001f600ß\u2028", "b": "<&" * 9}
    collection = {"key": [given["a"], None, True, -1.5, {}], "": 2**70}
    variables = {**given, "c": collection, "inf": math.inf}

    def made(max_size: int) -> Any:
        sandbox = Sandbox(max_size, {"tojson": to_json})
        meter = Meter(time.monotonic, 60.0, 10**6)
        program = sandbox.compiled("{% set made = (" + expression + ") %}")
        return program.make_module({sandbox.meter_name: meter, **variables}).made

    size = len(made(10**6))
    with pytest.raises(OutOfBounds):
        made(size - 1)
    assert len(made(5 * size + 500)) == size
