"""Answers in channels, as gpt-oss writes them (OpenAI's harmony format).

The prompt ends with ``<|start|>assistant``. The answer is messages, each a header and a text:

    <|channel|>analysis<|message|>What it thinks.<|end|>
    <|start|>assistant<|channel|>final<|message|>What it says.<|return|>

or, in place of the last one, a call:

    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>

The receiver may also stand before the channel. A call and a final message end the answer; their
last mark is its end token, which has no text. Must not know the engine or any API's JSON.
"""

from __future__ import annotations

import json
import re
from typing import Final

from minisgl_client import strict_json

from minisgl_gateway.call_syntax import CalledTool
from minisgl_gateway.json_reading import MOST_DEPTH, sendable
from minisgl_gateway.marks import begun_mark
from minisgl_gateway.thinking import Thought

FUNCTIONS: Final = "functions."
"""The prefix of receivers that are tools of the caller."""
_START: Final = "<|start|>"
_CHANNEL: Final = "<|channel|>"
_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_MARKS: Final = (_START, _MESSAGE, *_ENDS)
_MARK: Final = re.compile("|".join(map(re.escape, _MARKS)))
_HEADS: Final = ("assistant", "to=")
"""How a header begins, unless with a channel."""
_RECEIVER: Final = re.compile(r"(?:^|\s)to=(.+?)(?:\s+(?:json|code))?\s*(?:<\||$)", re.DOTALL)
_CHANNEL_NAME: Final = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")


class ChannelReader:
    """The state between two pieces of one answer.

    Analysis is ``Thought``; final messages, and commentary without a receiver, are text. A message
    to a function is a call, which is returned whole when it ends. Its text stays text if it is not
    a JSON object, if the receiver is not a function, or if no calls are to be read (``has_calls``).
    With ``calls_alone`` it is dropped instead, and so is a header that does not end: the engine
    keeps the answer to calls, so it is a call that was cut off. Unless ``separates_thoughts``,
    analysis is text, including its marks.
    """

    def __init__(
        self, *, has_calls: bool, calls_alone: bool = False, separates_thoughts: bool = True
    ) -> None:
        self._has_calls = has_calls
        self._calls_alone = calls_alone
        self._separates_thoughts = separates_thoughts
        self._header: list[str] | None = []
        """The header so far of the message that begins; None inside a message."""
        self._is_thought = False
        self._function: str | None = None
        """The function that receives the message, if any."""
        self._arguments: list[str] = []
        self._partial = ""
        """Text that may be the beginning of a mark."""

    def push(self, text: str) -> list[Thought | str | CalledTool]:
        """The parts that are certain with this piece."""
        found: list[Thought | str | CalledTool] = []
        text, self._partial = self._partial + text, ""
        while (mark := _MARK.search(text)) is not None:
            self._take(text[: mark.start()], found)
            self._meet(mark[0], found)
            text = text[mark.end() :]
        begun = begun_mark(text, _MARKS)
        self._take(text[:begun], found)
        self._partial = text[begun:]
        return found

    def finish(self) -> list[Thought | str | CalledTool]:
        """The rest, at the end of the answer."""
        found: list[Thought | str | CalledTool] = []
        rest, self._partial = self._partial, ""
        self._take(rest, found)
        self._end(found)
        return found

    def _take(self, text: str, found: list[Thought | str | CalledTool]) -> None:
        """Text between two marks."""
        if not text:
            return
        if self._header is not None:
            self._header.append(text)
        elif self._function is not None:
            self._arguments.append(text)
        elif self._is_thought and self._separates_thoughts:
            found.append(Thought(text))
        else:
            found.append(text)

    def _meet(self, mark: str, found: list[Thought | str | CalledTool]) -> None:
        if mark == _MESSAGE and self._header is not None:
            self._begin("".join(self._header), found)
        elif mark == _START:
            self._end(found)
        elif mark in _ENDS:
            if self._is_thought and not self._separates_thoughts and self._header is None:
                found.append(mark)
            self._end(found)
        else:  # a mark inside a message
            self._take(mark, found)

    def _begin(self, header: str, found: list[Thought | str | CalledTool]) -> None:
        """A message with this header begins."""
        channel = _CHANNEL_NAME.search(header)
        receiver = _RECEIVER.search(header)
        self._header = None
        self._is_thought = channel is not None and channel[1] == "analysis" and receiver is None
        self._function = None
        if receiver is not None and receiver[1].startswith(FUNCTIONS) and self._has_calls:
            self._function = receiver[1].removeprefix(FUNCTIONS)
        if self._is_thought and not self._separates_thoughts:
            found.append(f"{_CHANNEL}analysis{_MESSAGE}")

    def _end(self, found: list[Thought | str | CalledTool]) -> None:
        """The message ends; what follows is a header. A message to a function is a call if its text
        is a JSON object."""
        header = "".join(self._header or ())
        is_header = _CHANNEL in header or header.lstrip().startswith(_HEADS)
        if header and not (is_header or self._calls_alone):
            found.append(header)
        if self._function is not None:
            arguments = "".join(self._arguments)
            if self._function and _is_object(arguments):
                found.append(CalledTool(self._function, sendable(arguments.strip())))
            elif arguments and not self._calls_alone:
                found.append(arguments)
        self._arguments.clear()
        self._function, self._is_thought, self._header = None, False, []


def _is_object(text: str) -> bool:
    try:
        found = json.loads(text, parse_constant=strict_json.no_constant)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and strict_json.is_shallow(found, MOST_DEPTH)
