"""What a model thinks before it answers, split off from the answer's text.

A thinking section is at the beginning, between two marks such as ``<think>`` and ``</think>``; a
model may leave it out. Later marks are text. Templates drop the line breaks around a thought and
before the answer, and so does the reader. Must not know tokens, or which model writes such marks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from minisgl_gateway.marks import begun_mark

_BREAKS: Final = "\r\n"


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of what the model thinks."""

    text: str


class _Place(Enum):
    BEFORE = auto()
    """Only blanks so far."""
    THINKING = auto()
    BEHIND = auto()
    """Only line breaks since the end mark."""
    ANSWERING = auto()


class ThinkingReader:
    """The state between two pieces of one answer.

    ``marks`` begin and end the section. With ``begins_inside`` the prompt has begun it already;
    if the model begins it again, it means the same section.
    """

    def __init__(self, marks: tuple[str, str], begins_inside: bool = False) -> None:
        self._begin, self._end = marks
        self._begins_inside = begins_inside
        self._place = _Place.BEFORE
        self._has_thought = False
        self._held: list[str] = []
        """Line breaks of a thought, or blanks before it, that may have to be dropped."""
        self._partial = ""
        """Text after the held text that may be the beginning of a mark."""

    def push(self, text: str) -> list[Thought | str]:
        """The thoughts and texts that are certain with this piece."""
        found: list[Thought | str] = []
        text, self._partial = self._partial + text, ""
        if self._place is _Place.BEFORE:
            text = self._before(text)
        if self._place is _Place.THINKING:
            text = self._thinking(text, found)
        if self._place is _Place.BEHIND:
            text = text.lstrip(_BREAKS)
            if text:
                self._place = _Place.ANSWERING
        if self._place is _Place.ANSWERING and text:
            found.append(text)
        return found

    def finish(self) -> list[Thought | str]:
        """The rest, at the end of the answer, which may be in the middle of a thought."""
        rest = "".join([*self._held, self._partial])
        is_thought = self._place is _Place.THINKING or (
            self._place is _Place.BEFORE and self._begins_inside
        )
        if is_thought and not self._partial:  # line breaks
            rest = ""
        self._held.clear()
        self._partial = ""
        if not rest:
            return []
        return [Thought(rest) if is_thought else rest]

    def _before(self, text: str) -> str:
        body = text.lstrip()
        if len(body) < len(text):
            self._held.append(text[: len(text) - len(body)])
        if body.startswith(self._begin):
            self._held.clear()
            self._place = _Place.THINKING
            return body.removeprefix(self._begin)
        if self._begin.startswith(body):
            self._partial = body
            return ""
        body = "".join([*self._held, body])
        self._held.clear()
        self._place = _Place.THINKING if self._begins_inside else _Place.ANSWERING
        return body

    def _thinking(self, text: str, found: list[Thought | str]) -> str:
        """Add the text of the thought to ``found``; returns the text after the end mark."""
        thought, mark, rest = text.partition(self._end)
        if not mark:
            begun = begun_mark(text, (self._end,))
            thought, self._partial = text[:begun], text[begun:]
        body = thought.rstrip(_BREAKS)
        if body:
            whole = "".join([*self._held, body])
            found.append(Thought(whole if self._has_thought else whole.lstrip(_BREAKS)))
            self._has_thought = True
            self._held.clear()
        if mark:
            self._held.clear()
            self._place = _Place.BEHIND
        elif len(body) < len(thought):
            self._held.append(thought[len(body) :])
        return rest
