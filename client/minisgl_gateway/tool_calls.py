"""Tool calls in the text of an answer.

A ``CallReader`` takes the text piece by piece, however it is cut, and returns plain text and whole
calls in order. How a model writes calls is its ``Syntax`` (``call_syntax``).

What turns out not to be a call stays text: nothing is lost or invented, except blanks around calls
and what separates them. Each character is looked at a bounded number of times. Must not know
schemas of tools, or any API's JSON.
"""

from __future__ import annotations

import re
from typing import Final

from minisgl_gateway.call_syntax import CalledTool, Following, Syntax
from minisgl_gateway.json_reading import NotACall
from minisgl_gateway.marks import begun_mark

_PIECE_CHARS: Final = 1024


class CallReader:
    """The state between two pieces of one answer."""

    def __init__(self, syntax: Syntax, *, calls_alone: bool = False) -> None:
        """``calls_alone``: the engine keeps the answer to calls, so what is left at its end is a
        call that was cut off, not text."""
        self.num_calls = 0
        self._calls_alone = calls_alone
        self._syntax = syntax
        self._opening = re.compile("|".join(map(re.escape, syntax.openings)))
        self._found: list[str | CalledTool] = []
        self._held: list[str] = []
        """Blanks, and a separator after a call: both are dropped if a call follows."""
        self._partial = ""
        """Text after the held text that may be the beginning of an opening."""
        self._is_behind_call = False
        self._following: Following | None = None
        self._followed: list[str] = []
        """Characters since the opening, or since the last call of a list."""

    def push(self, text: str) -> list[str | CalledTool]:
        """The texts and calls that this piece completes."""
        for begin in range(0, len(text), _PIECE_CHARS):
            rest = text[begin : begin + _PIECE_CHARS]
            while rest:
                rest = self._search(rest) if self._following is None else self._follow(rest)
        found, self._found = self._found, []
        return found

    def finish(self, *, closed: bool = False) -> list[str | CalledTool]:
        """The rest, at the end; ``closed`` if the closing of a call was the stop string."""
        found = self.push(self._syntax.closing if closed and self._following else "")
        rest = "".join([*self._held, self._partial, *self._followed])
        self._following, self._partial = None, ""
        self._held.clear()
        self._followed.clear()
        if rest and not self._calls_alone and not (self.num_calls and rest.isspace()):
            found.append(rest)
        return found

    def _search(self, text: str) -> str:
        """Keep the text before an opening; returns the rest, which begins with the opening."""
        text, self._partial = self._partial + text, ""
        opening = self._opening.search(text)
        if opening is not None:
            self._keep(text[: opening.start()])
            self._following = self._syntax.follow()
            next(self._following)
            return text[opening.start() :]
        begun = begun_mark(text, self._syntax.openings)
        self._keep(text[:begun])
        self._partial = text[begun:]
        return ""

    def _follow(self, text: str) -> str:
        """Read on in calls; returns the rest: what comes after them, or what is not a call."""
        assert self._following is not None
        for index, char in enumerate(text):
            try:
                called = self._following.send(char)
            except StopIteration as end:
                self._following = None
                self._call(end.value)
                return text[index + 1 :]
            except NotACall as no:
                self._following = None
                followed = "".join(self._followed)
                self._followed.clear()
                again = len(followed) - no.num_read
                self._keep(followed[:again])
                return followed[again:] + text[index:]
            self._followed.append(char)
            if called is not None:
                self._call(called)
        return ""

    def _call(self, called: CalledTool | None) -> None:
        self._held.clear()
        self._followed.clear()
        self._is_behind_call = True
        if called is not None:
            self.num_calls += 1
            self._found.append(called)

    def _keep(self, text: str) -> None:
        """Emit what is certainly text, and hold what a call would drop."""
        body = text.rstrip()
        if body and self._is_behind_call:
            self._is_behind_call = False
            if body.lstrip() == self._syntax.separator:
                body = ""
        if body:
            self._found.append("".join([*self._held, body]))
            self._held.clear()
        if len(body) < len(text):
            self._held.append(text[len(body) :])
