"""Jinja's immutable sandbox, with bounds on the time and the memory that a template takes.

Knows Jinja. Must not know chats. The time is checked in each iteration of a loop, each call of a
macro, a filter or a test, and in comparisons. All characters that are written are counted, even
those written into variables. An operation whose result would be too large is refused before it
runs, since one line can ask for a terabyte; ``sandbox_sizes`` knows how large it would be. What is
too large is not compared or used as a key, either: a list that holds another one twice is compared
as if it held two.

A ``Meter`` belongs to one rendering. It is passed as the variable ``Sandbox.meter_name``, a random
name, so that no template can replace it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from jinja2 import TemplateSyntaxError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from minisgl_backend.text.sandbox_sizes import LISTED, OutOfBounds, Sizes

_OF_JINJA: Final = frozenset({"_loop_vars", "_block_vars"})
"""Arguments that Jinja adds to calls in loops and blocks."""
_MOST_FILTERED: Final = 4
"""How much filters may make in all, as a multiple of what may be written: ``map`` calls them for
each item of a list."""


class Meter:
    """The time and characters that one rendering has taken so far."""

    def __init__(self, clock: Callable[[], float], max_seconds: float, max_chars: int) -> None:
        self._clock = clock
        self._max_seconds = max_seconds
        self._end_s = clock() + max_seconds
        self._max_chars = max_chars
        self._num_chars = 0
        self._num_filtered = 0

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

    def filtered(self, size: int) -> None:
        """Count what a filter has made."""
        self._num_filtered += size
        if self._num_filtered > _MOST_FILTERED * self._max_chars:
            raise OutOfBounds("makes too much by filters")


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for templates; ``max_size`` bounds every string and list that they make.
    ``filters`` are added to Jinja's, or take their places; ``Sizes`` must know them."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, max_size: int, filters: Mapping[str, Callable[..., Any]]) -> None:
        self.meter_name = f"_meter_{secrets.token_hex(8)}"
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationBlock],
            finalize=pass_context(lambda context, value: self._write(context, value)),
        )
        self.sizes = Sizes(max_size)
        del self.globals["lipsum"]
        self._join_name = f"_join_{secrets.token_hex(8)}"
        self.globals[self._join_name] = self._concatenated
        own = {"join": self._join, "sum": self._sum}
        for name, function in {**self.filters, **own, **filters}.items():
            self.filters[name] = self._bounded_filter(name, function)
        tests: dict[str, Any] = self.tests
        for name, function in tests.items():
            tests[name] = self._bounded_test(name, function)
        # As filters, these are called with the context and little else.
        self._operand_name = f"_operand_{secrets.token_hex(8)}"
        self.filters[self._operand_name] = self._operand
        self._searched_name = f"_searched_{secrets.token_hex(8)}"
        self.filters[self._searched_name] = self._searched
        self._difference_name = f"_difference_{secrets.token_hex(8)}"
        self.filters[self._difference_name] = self.sizes.difference

    def compiled(self, source: str) -> Any:
        """The template of a program, metered. Raises ``TemplateError``."""
        program = self.parse(source)
        for node in program.find_all(nodes.EvalContextModifier):
            raise TemplateSyntaxError("autoescape is not supported", node.lineno)
        self._insert_meters(program)
        _Concatenations(self._join_name).visit(program)
        _Comparisons(self._operand_name, self._searched_name, self._difference_name).visit(program)
        return self.from_string(program)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.sizes.check_operator(operator, left, right)
        return self._checked(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # Jinja wraps a string's ``format``
        owner = getattr(method, "__self__", None)
        name = getattr(method, "__name__", "")
        given = {key: value for key, value in kwargs.items() if key not in _OF_JINJA}
        if isinstance(owner, str) and name == "format":
            return self.sizes.formatted(self, owner, args, given)
        if isinstance(owner, str) and name == "format_map":
            return self.sizes.formatted(self, owner, (), *args)
        if isinstance(owner, str) and name == "join":
            args = tuple(self.sizes.listed(items, owner) for items in args)
        if isinstance(obj, type):  # ``dict`` takes keys
            args = tuple(self._searched(context, arg) for arg in args)
        elif not isinstance(owner, str) and isinstance(owner, (Collection, LoopContext)):
            args = tuple(self._searched(context, self._operand(context, arg)) for arg in args)
        self.sizes.check_method(name, owner, args, given)
        return self._checked(super().call(context, obj, *args, **kwargs))

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        pass_argument = self._what_jinja_passes(function)

        @pass_context
        def bounded(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> Any:
            meter: Meter = context[self.meter_name]
            meter(0)
            if name in LISTED:
                value = self.sizes.listed(value)
            for arg in (*args, *kwargs.values()):
                if isinstance(arg, tuple):  # is a key as an attribute
                    self.sizes.check_operand(arg)
            self.sizes.check_filter(name, (value, *args), kwargs)
            result = self._checked(function(*pass_argument(context), value, *args, **kwargs))
            meter.filtered(len(result) if isinstance(result, (str, list)) else 1)
            return result

        return bounded

    def _bounded_test(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        pass_argument = self._what_jinja_passes(function)

        @pass_context
        def bounded(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> Any:
            context[self.meter_name](0)
            self.sizes.check_test(name, value)
            if (args or kwargs) and name != "sameas":
                value = self._operand(context, value)
                args = tuple(self._searched(context, arg) for arg in args)
                kwargs = {key: self._searched(context, arg) for key, arg in kwargs.items()}
            return function(*pass_argument(context), value, *args, **kwargs)

        return bounded

    def _what_jinja_passes(
        self, function: Callable[..., Any]
    ) -> Callable[[Context], tuple[Any, ...]]:
        """What comes before the value, from the context."""
        mark = getattr(function, "jinja_pass_arg", None)
        kind = None if mark is None else mark.name
        if kind == "context":
            return lambda context: (context,)
        if kind == "eval_context":
            return lambda context: (context.eval_ctx,)
        return lambda context: () if kind is None else (self,)

    def _join(self, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
        items = value if attribute is None else map(make_attrgetter(self, attribute), value)
        separator = self.sizes.text(d)
        return separator.join(map(str, self.sizes.listed(items, separator)))

    @pass_context
    def _sum(
        self,
        context: Context,
        iterable: Iterable[Any],
        attribute: str | int | None = None,
        start: Any = 0,
    ) -> Any:
        items = iterable if attribute is None else map(make_attrgetter(self, attribute), iterable)
        for item in items:
            context[self.meter_name](0)
            start = self.call_binop(context, "+", start, item)
        return start

    def _concatenated(self, *parts: Any) -> str:
        texts = []
        size = 0
        for part in parts:
            text = self.sizes.text(part)
            texts.append(text)
            size += len(text)
            self.sizes.check(size)
        return "".join(texts)

    @pass_context
    def _operand(self, context: Context, value: Any) -> Any:
        """The value, which is not too large to be compared or to be a key."""
        if not isinstance(value, (int, float)):
            context[self.meter_name](0)
            self.sizes.check_operand(value)
        return value

    @pass_context
    def _searched(self, context: Context, value: Any) -> Any:
        """The value, which is not too large to be searched for an operand.

        In a mapping, only the operand is hashed. Items of an iterator are not known before.
        """
        if isinstance(value, Mapping):
            return value
        if isinstance(value, Iterator):
            return (self._operand(context, item) for item in value)
        return self._operand(context, value)

    def _write(self, context: Context, value: Any) -> str:
        text = self.sizes.text(value)
        meter: Meter = context[self.meter_name]
        meter.wrote(len(text))
        return text

    def _checked(self, value: Any) -> Any:
        if isinstance(value, (str, list, tuple)):
            self.sizes.check(len(value))
        return value

    def _insert_meters(self, program: nodes.Template) -> None:
        for node in program.find_all(_BODIES):
            assert isinstance(node, _BODIES)
            call = self._metering(_num_chars(node.body), node.lineno)
            node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
            if isinstance(node, nodes.For) and node.test is not None:
                call = self._metering(0, node.lineno)  # none, so that the test decides
                node.test = nodes.Or(call, node.test, lineno=node.lineno)
                node.test.set_environment(self)

    def _metering(self, num_chars: int, lineno: int) -> nodes.Call:
        name = nodes.Name(self.meter_name, "load", lineno=lineno)
        return nodes.Call(
            name, [nodes.Const(num_chars, lineno=lineno)], [], None, None, lineno=lineno
        )


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


class _Comparisons(NodeTransformer):
    """Passes what is compared, or is a key, through filters that check it.

    The arguments are names of filters: ``searched`` takes what ``in`` looks into, ``difference``
    both sides of ``-``.
    """

    def __init__(self, operand: str, searched: str, difference: str) -> None:
        self._operand = operand
        self._searched = searched
        self._difference = difference

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if len(node.ops) == 1 and (_is_literal(node.expr) or _is_literal(node.ops[0].expr)):
            return node  # takes no longer than the smaller one of both
        node.expr = _filtered(self._operand, node.expr)
        for operand in node.ops:
            is_searched = operand.op in ("in", "notin")
            if not is_searched or operand is not node.ops[-1]:
                operand.expr = _filtered(self._operand, operand.expr)
            if is_searched:
                operand.expr = _filtered(self._searched, operand.expr)
        return node

    def visit_Sub(self, node: nodes.Sub) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(self._difference, node.left, node.right)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, (nodes.Const, nodes.Slice)):
            node.arg = _filtered(self._operand, node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _filtered(self._operand, node.key)
        return node


def _is_literal(node: nodes.Expr) -> bool:
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return all(map(_is_literal, node.items))
    return isinstance(node, nodes.Const)


def _filtered(name: str, value: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    made = nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)
    assert value.environment is not None
    made.set_environment(value.environment)
    return made


class _GenerationBlock(Extension):
    """``{% generation %} ... {% endgeneration %}`` renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 (its type is Jinja's)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
