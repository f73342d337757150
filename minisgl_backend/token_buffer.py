"""Where a request's common tokens go if its sink has a buffer, without an event for each.

Knows two threads: one that appends tokens, and one that takes them. Must not know who these are.
"""

from __future__ import annotations

from collections.abc import Callable

from minisgl_backend.request import Event, Sink, TokenId


class TokenBuffer:
    """Where a request's common tokens go: those that are not its last and have no
    log-probabilities. An event and a call for each of them would cost more than everything else.

    Only the engine's thread appends to ``tokens``. If a token ``is_awaited``, it then calls
    ``wake``, as it would call a sink. Only one thread at a time takes tokens from the front. A
    reader first sets ``is_awaited`` and then looks for tokens, so it misses none.
    """

    __slots__ = ("is_awaited", "tokens", "wake")

    def __init__(self, wake: Callable[[], None]) -> None:
        self.tokens: list[TokenId] = []
        self.is_awaited = True
        self.wake = wake

    def take(self) -> list[TokenId]:
        """Remove and return what is there; more may be appended meanwhile."""
        taken = self.tokens[:]
        del self.tokens[: len(taken)]
        return taken


class BufferedSink:
    """A request's sink whose common tokens go to ``buffer`` instead."""

    __slots__ = ("buffer", "sink")

    def __init__(self, sink: Sink, buffer: TokenBuffer) -> None:
        self.sink = sink
        self.buffer = buffer

    def __call__(self, event: Event) -> None:
        self.sink(event)
