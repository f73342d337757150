"""Chat templates: messages -> the prompt's text, by the Jinja program of a model's folder.

Templates come with checkpoints, which are not always trustworthy, and run on what clients send. So
they run in Jinja's immutable sandbox, see plain data only, and are bounded in time (checked at each
turn of a loop and each macro call) and in size. What they may use beside Jinja follows
transformers: ``raise_exception``, ``strftime_now``, ``tojson`` that does not escape HTML, loop
controls, and the ``generation`` block, which only marks text for training.

A ``ChatTemplate`` may render on several threads at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minisgl_backend.errors import ConfigError, InvalidRequest
from minisgl_backend.text.messages import join_parts

MAX_SECONDS: Final = 5.0
_TICK: Final = "_minisgl_tick"
_PROBE: Final = "a probe of 29 letters and more"


class ChatTemplate:
    """One template. ``special_tokens`` are its variables, such as ``bos_token``."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, Any],
        *,
        max_chars: int,
        max_seconds: float = MAX_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        self._max_seconds = max_seconds
        self._clock = clock
        environment = _Sandbox(max_chars)
        try:
            program = environment.parse(source)
            _insert_ticks(program)
            self._template = environment.from_string(program)
        except TemplateError as error:
            raise ConfigError(f"the chat template does not compile: {error}") from None
        self._takes_parts = self._shows_parts()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a chat, up to where the assistant's answer begins.

        Raises ``InvalidRequest`` where the template refuses the chat, or a bound is exceeded.
        """
        plain = [dict(message) for message in messages]
        return self._render(plain if self._takes_parts else join_parts(plain), tools)

    def _render(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> str:
        pieces = []
        num_chars = 0
        try:
            for piece in self._template.generate(
                **self._special_tokens,
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=True,
                **{_TICK: self._deadline()},
            ):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > self._max_chars:
                    raise _OutOfBounds(f"makes more than {self._max_chars} characters")
        except _OutOfBounds as error:
            raise InvalidRequest(f"the chat template {error}") from None
        except Exception as error:
            # Anything may be raised by a program over data that it did not expect.
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise InvalidRequest(f"the chat template refuses the messages: {reason}") from None
        return "".join(pieces)

    def _deadline(self) -> Callable[[], None]:
        end = self._clock() + self._max_seconds

        def tick() -> None:
            if self._clock() > end:
                raise _OutOfBounds(f"runs longer than {self._max_seconds:g} s")

        return tick

    def _shows_parts(self) -> bool:
        """Whether the template reads a content that is a list of text parts, or only a string."""
        parts = [{"type": "text", "text": _PROBE}]
        try:
            text = self._render([{"role": "user", "content": parts}], None)
        except InvalidRequest:
            return False
        return _PROBE in text and "'type'" not in text and '"type"' not in text


class _OutOfBounds(Exception):
    """A template took too long or wrote too much."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox with transformers' additions, and bounds on what one operator can make."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self, max_chars: int) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        self._max_size = max_chars
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        del self.globals["lipsum"]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > 2**32 or abs(right) > 64):
            raise _OutOfBounds("computes too large a power")
        if operator == "*":
            for size, times in ((left, right), (right, left)):
                if isinstance(size, (str, list, tuple)) and len(size) * times > self._max_size:
                    raise _OutOfBounds("makes too long a value")
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, (str, list, tuple)) and len(result) > self._max_size:
            raise _OutOfBounds("makes too long a value")
        return result


class _GenerationBlock(Extension):
    """``{% generation %} ... {% endgeneration %}`` renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 (its type is Jinja's)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _insert_ticks(program: nodes.Template) -> None:
    """Make every turn of a loop and every call of a macro look at the clock."""
    for node in program.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        assert isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock))
        call = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
        tick = nodes.ExprStmt(call).set_lineno(node.lineno)
        for child in tick.find_all(nodes.Node):
            child.set_lineno(node.lineno)
        node.body.insert(0, tick)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
