"""What an answer is made of, whichever API returns it: thoughts, texts, tool calls, and its end.

``AnswerReader`` takes what the engine sends for one choice, a delta at a time or a whole result at
once, and returns a ``Piece``: the parts that this completes, in order, and the ending if it is the
last. Must not know the engine's parameters, or any API's JSON.

Texts of one kind may come in several pieces; a call comes whole. The texts of all pieces, one after
the other, are the same however the answer was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias

from minisgl_client.answer import Delta, Result

from minisgl_gateway.call_syntax import CalledTool
from minisgl_gateway.engine_errors import api_error_of_finish
from minisgl_gateway.thinking import Thought
from minisgl_gateway.tool_calls import CallReader

Part: TypeAlias = "Thought | str | CalledTool"


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an answer ended.

    ``reason`` is ``stop`` if the answer ended by itself or at a stop string, and ``length`` if
    ``max_tokens`` or the context cut it off. ``stop`` is the caller's stop string that matched;
    None if none did, or if ``Chat.tells_stop`` was not set.
    """

    reason: Literal["stop", "length"]
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What a delta, or a whole result, adds to its answer.

    ``source`` is what the engine sent: it has counts and log-probabilities. ``num_calls`` counts
    the calls of the answer so far. ``num_thought_tokens`` counts the tokens whose text is thoughts;
    if the piece has other text, too, it is estimated by the share of characters.
    """

    source: Delta | Result
    parts: list[Part]
    num_calls: int = 0
    ending: Ending | None = None
    num_thought_tokens: int = 0

    @property
    def text(self) -> str:
        """The texts, without thoughts and calls."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def thoughts(self) -> str:
        """The thoughts alone."""
        return "".join(part.text for part in self.parts if isinstance(part, Thought))

    @property
    def calls(self) -> list[CalledTool]:
        """The calls alone."""
        return [part for part in self.parts if isinstance(part, CalledTool)]


class TextReader(Protocol):
    """Splits an answer's text into its parts, however it is cut."""

    def push(self, text: str) -> Sequence[Part]:
        """The parts that are certain with this piece."""

    def finish(self) -> Sequence[Part]:
        """The rest, at the end of the answer."""


class AnswerReader:
    """The state between two pieces of one choice; without readers the whole choice is one text.

    ``reader`` takes the text first; what it leaves as text goes through ``calls``. ``own_stop`` is
    the stop string that ends an answer after its first call. With ``includes_stop`` the text ends
    with the caller's stop string that matched.
    """

    def __init__(
        self,
        calls: CallReader | None = None,
        reader: TextReader | None = None,
        own_stop: str | None = None,
        *,
        includes_stop: bool = False,
    ) -> None:
        self._calls = calls
        self._reader = reader
        self._own_stop = own_stop
        self._includes_stop = includes_stop
        self._num_calls = 0
        self._num_tokens = 0
        """Tokens whose text has not come yet."""

    def push(self, source: Delta | Result) -> Piece:
        """The next piece; raises ``ApiError`` if the answer was cancelled, or ran out of time."""
        matched = source.stop_reason
        closed = matched is not None and matched == self._own_stop
        ending = None
        if source.finish_reason is not None:
            stop = matched if isinstance(matched, str) and not closed else None
            ending = Ending(_reason(source.finish_reason), stop)
            if stop is not None and self._includes_stop:
                source = replace(source, text=source.text + stop)
        parts: list[Part] = [source.text] if source.text else []
        num_thought_tokens = 0
        if self._reader is not None:
            parts = [*self._reader.push(source.text)]
            if ending is not None:
                parts += self._reader.finish()
            num_thought_tokens = self._counted(source, parts)
        if self._calls is not None:
            found: list[Part] = []
            for part in parts:
                found += self._calls.push(part) if isinstance(part, str) else [part]
            if ending is not None:
                found += self._calls.finish(closed=closed)
            parts = found
        self._num_calls += sum(isinstance(part, CalledTool) for part in parts)
        return Piece(source, parts, self._num_calls, ending, num_thought_tokens)

    def _counted(self, source: Delta | Result, parts: list[Part]) -> int:
        """The number of tokens of the thoughts among ``parts``; the other parts are texts."""
        self._num_tokens += source.num_output_tokens or 0
        if not parts:
            return 0
        num_tokens, self._num_tokens = self._num_tokens, 0
        num_chars = sum(len(part) for part in parts if isinstance(part, str))
        num_chars += sum(len(part.arguments) for part in parts if isinstance(part, CalledTool))
        num_thought_chars = sum(len(part.text) for part in parts if isinstance(part, Thought))
        return round(num_tokens * num_thought_chars / max(1, num_chars + num_thought_chars))


def _reason(finish_reason: str) -> Literal["stop", "length"]:
    if finish_reason == "stop":
        return "stop"
    if finish_reason == "length":
        return "length"
    raise api_error_of_finish(finish_reason)
