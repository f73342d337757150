"""Jinja's immutable sandbox, with bounds on the time and the memory that a template takes.

Knows Jinja. Must not know chats. The time is checked in each iteration of a loop and each call of a
macro. All characters that are written are counted, even those written into variables. An operation
whose result would be too large is refused before it runs, since one line can ask for a terabyte.

A ``Meter`` belongs to one rendering. It is passed as the variable ``Sandbox.meter_name``, a random
name, so that no template can replace it.
"""

from __future__ import annotations

import functools
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_MAX_INDENT: Final = 8
_WIDE: Final = re.compile(r"\d{5}")
"""A field width in a format string that is larger than any prompt needs."""
_GIVEN_WIDTH: Final = re.compile(r"%[^%a-zA-Z]*\*")
"""A field of ``%`` whose width or precision is an argument, such as ``%*d``."""
_WIDENED: Final = {"indent": ("\n", 4), "expandtabs": ("\t", 8)}
"""Methods of strings, and filters, that add as much as an argument says, or this by default, for
each such character."""
_SIZED: Final = frozenset({"batch", "center", "ljust", "rjust", "round", "slice", "zfill"})
"""Methods of strings, and filters, that make as much as a number among their arguments says."""


class OutOfBounds(Exception):
    """A template took too long or made too much; the message continues ``the template ...``."""


class Meter:
    """The time and characters that one rendering has taken so far."""

    def __init__(self, clock: Callable[[], float], max_seconds: float, max_chars: int) -> None:
        self._clock = clock
        self._max_seconds = max_seconds
        self._end_s = clock() + max_seconds
        self._max_chars = max_chars
        self._num_chars = 0

    def __call__(self, num_chars: int) -> None:
        """Count an iteration of a loop or a call of a macro whose body has ``num_chars``."""
        if self._clock() > self._end_s:
            raise OutOfBounds(f"runs longer than {self._max_seconds:g} s")
        self.wrote(num_chars)

    def wrote(self, num_chars: int) -> None:
        """Count characters that were written to the output or into a variable."""
        self._num_chars += num_chars
        if self._num_chars > self._max_chars:
            raise OutOfBounds(f"makes more than {self._max_chars} characters")


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for templates; ``max_size`` bounds every string and list that they make.
    ``filters`` are added to Jinja's, or take their places."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, max_size: int, filters: Mapping[str, Callable[..., Any]]) -> None:
        self.meter_name = f"_meter_{secrets.token_hex(8)}"
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationBlock],
            finalize=pass_context(lambda context, value: self._write(context, value)),
        )
        self._max_size = max_size
        del self.globals["lipsum"]
        self._join_name = f"_join_{secrets.token_hex(8)}"
        self.globals[self._join_name] = self._concatenated
        for name, function in {**self.filters, **filters}.items():
            self.filters[name] = self._bounded(name, function)

    def compiled(self, source: str) -> Any:
        """The template of a program, metered. Raises ``TemplateError``."""
        program = self.parse(source)
        self._insert_meters(program)
        _Concatenations(self._join_name).visit(program)
        return self.from_string(program)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > 2**32 or abs(right) > 64):
            raise OutOfBounds("computes too large a power")
        if operator == "*":
            for size, times in ((left, right), (right, left)):
                if isinstance(size, (str, bytes, list, tuple)):
                    self._check_size(len(size) * times)
        if operator == "%" and isinstance(left, str):
            _check_percent_format(left)
        return self._checked(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # Jinja wraps a string's ``format``
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            if obj.__name__ == "join" and args:
                args = self._joinable(owner, args[0]), *args[1:]
            elif obj.__name__ in ("format", "format_map"):
                _check_brace_format(owner)
            self._check_call(obj.__name__, owner, [*args, *kwargs.values()])
        return self._checked(super().call(context, obj, *args, **kwargs))

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        num_before = int(hasattr(function, "jinja_pass_arg"))  # what Jinja passes before the value

        @functools.wraps(function)  # and with it the mark that Jinja looks for
        def bounded(*args: Any, **kwargs: Any) -> Any:
            before, (value, *given) = args[:num_before], args[num_before:]
            if name == "join":
                separator = given[0] if given else kwargs.get("d", "")
                value = self._joinable(str(separator), value)
            elif name == "format":
                _check_percent_format(str(value))
            self._check_call(name, value, [*given, *kwargs.values()])
            return self._checked(function(*before, value, *given, **kwargs))

        return bounded

    def _check_call(self, name: str, value: Any, args: list[Any]) -> None:
        """Refuse a call of a method of the string ``value``, or of a filter of any value, whose
        result would be too large."""
        texts = [arg for arg in args if isinstance(arg, str)]
        numbers = [abs(arg) for arg in args if isinstance(arg, int)]
        if name == "translate":
            raise OutOfBounds("may not call translate")
        elif name == "replace" and len(texts) >= 2:
            text, old, new = str(value), *texts[:2]
            self._check_size(len(text) + text.count(old) * len(new))
        elif name in _WIDENED:
            character, width = _WIDENED[name]
            width = max([width, *numbers, *map(len, texts)])
            self._check_size((str(value).count(character) + 1) * width)
        elif name == "tojson" and max([*numbers, *map(len, texts)], default=0) > _MAX_INDENT:
            raise OutOfBounds(f"makes an indent of more than {_MAX_INDENT}")
        elif name in _SIZED:
            self._check_size(max(numbers, default=0))

    def _joinable(self, separator: str, items: Iterable[Any]) -> list[Any]:
        known = list(items)
        self._check_size(len(separator) * len(known) + sum(len(str(item)) for item in known))
        return known

    def _concatenated(self, *parts: Any) -> str:
        texts = [str(part) for part in parts]
        self._check_size(sum(map(len, texts)))
        return "".join(texts)

    def _write(self, context: Context, value: Any) -> str:
        text = str(value)
        meter: Meter = context[self.meter_name]
        meter.wrote(len(text))
        return text

    def _checked(self, value: Any) -> Any:
        if isinstance(value, (str, bytes, list, tuple)):
            self._check_size(len(value))
        return value

    def _check_size(self, size: int) -> None:
        if size > self._max_size:
            raise OutOfBounds("makes too long a value")

    def _insert_meters(self, program: nodes.Template) -> None:
        for node in program.find_all(_BODIES):
            assert isinstance(node, _BODIES)
            call = nodes.Call(
                nodes.Name(self.meter_name, "load"),
                [nodes.Const(_num_chars(node.body))],
                [],
                None,
                None,
            )
            statement = nodes.ExprStmt(call).set_lineno(node.lineno)
            for child in statement.find_all(nodes.Node):
                child.set_lineno(node.lineno)
            node.body.insert(0, statement)


_BODIES: Final = (nodes.For, nodes.Macro, nodes.CallBlock)


def _num_chars(body: list[nodes.Node]) -> int:
    """The length of the text in a body, without nested bodies, which are counted separately."""
    total = 0
    for node in body:
        if isinstance(node, nodes.TemplateData):
            total += len(node.data)
        elif not isinstance(node, _BODIES):
            total += _num_chars(list(node.iter_child_nodes()))
    return total


def _check_percent_format(text: str) -> None:
    if _WIDE.search(text) or _GIVEN_WIDTH.search(text):
        raise OutOfBounds("makes too wide a field")


def _check_brace_format(text: str) -> None:
    fields = string.Formatter().parse(text)
    if _WIDE.search(text) or any("{" in (spec or "") for _, _, spec, _ in fields):
        raise OutOfBounds("makes too wide a field")


class _Concatenations(NodeTransformer):
    """Turns ``a ~ b`` into a call of a function, which can check the lengths first."""

    def __init__(self, function: str) -> None:
        self._function = function

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        name = nodes.Name(self._function, "load", lineno=node.lineno)
        call = nodes.Call(name, node.nodes, [], None, None, lineno=node.lineno)
        assert node.environment is not None
        return call.set_environment(node.environment)


class _GenerationBlock(Extension):
    """``{% generation %} ... {% endgeneration %}`` renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 (its type is Jinja's)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
