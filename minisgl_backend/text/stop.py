"""Stop strings in a stream of text: Aho and Corasick's automaton (1975), one character at a time.

Its state says whether a stop string ends here, and how many of the last characters may be the
beginning of one and must be held back. Time is linear in the text, whatever the strings are. Must
not know tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """The automaton of some stop strings, none of them empty. State 0 is the start."""

    __slots__ = ("_edges", "_fallbacks", "held", "matched")

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._edges: list[dict[str, int]] = [{}]
        self._fallbacks = [0]
        self.held = [0]
        """By state: characters that may begin a stop string."""
        self.matched: list[str | None] = [None]
        """By state: the longest stop string that ends here."""
        for text in stop_strings:
            self._insert(text)
        self._link()

    def _insert(self, text: str) -> None:
        state = 0
        for depth, char in enumerate(text, 1):
            if char not in self._edges[state]:
                self._edges[state][char] = len(self._edges)
                self._edges.append({})
                self._fallbacks.append(0)
                self.held.append(depth)
                self.matched.append(None)
            state = self._edges[state][char]
        self.matched[state] = text

    def _link(self) -> None:
        # Breadth first, so that a state's fallback, which is shorter, is complete before it.
        queue = deque(self._edges[0].values())
        while queue:
            state = queue.popleft()
            fallback = self._fallbacks[state]
            self.matched[state] = self.matched[state] or self.matched[fallback]
            if not self._edges[state]:  # a complete stop string; only a suffix may begin another
                self.held[state] = self.held[fallback]
            for char, child in self._edges[state].items():
                self._fallbacks[child] = self._next(fallback, char)
                queue.append(child)

    def _next(self, state: int, char: str) -> int:
        while state and char not in self._edges[state]:
            state = self._fallbacks[state]
        return self._edges[state].get(char, 0)

    def advance(self, state: int, text: str) -> int:
        """The state after a text, matches or not."""
        for char in text:
            state = self._next(state, char)
        return state

    def search(self, state: int, text: str) -> tuple[int, int]:
        """Read until the first match: the state there, and the number of characters read.

        The first match is the one that ends first; of several that end together, the longest. With
        no match all of the text is read, and ``matched`` of the state is None.
        """
        edges, matched = self._edges, self.matched
        for position, char in enumerate(text, 1):
            state = self._next(state, char) if state else edges[0].get(char, 0)
            if state and matched[state] is not None:
                return state, position
        return state, len(text)
