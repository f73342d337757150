"""How an API writes the answer to one of its requests.

A route makes a ``Renderer`` for each request, and ``Service`` gives it the answer: either all of
its choices at once (``body``), or the pieces of each choice as they come (``writer``), and then
what concerns all choices (``closing``, or ``failure``).

A writer's first piece has the number of input tokens (``piece.source``, if ``Chat.tells_counts`` is
set), so that a stream can begin with it. A renderer that keeps complete answers for later requests
stores them in ``body`` or ``closing``. Must not know how the engine is asked, or how bytes are
sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from minisgl_gateway.counts import Counts
from minisgl_gateway.errors import ApiError
from minisgl_gateway.parts import Piece


class Writer(Protocol):
    """Writes one choice of a stream."""

    def push(self, piece: Piece) -> bytes:
        """The events of a piece, which may be none."""
        ...


class Renderer(Protocol):
    """The answer to one request."""

    @property
    def id(self) -> str:
        """The id of the answer, which also appears in the log."""
        ...

    @property
    def fields(self) -> Collection[str]:
        """Names that an error may have as its ``param``."""
        ...

    @property
    def names(self) -> Mapping[str, str]:
        """Names of the API for those of the engine, if they differ (see
        ``engine_errors.api_error``)."""
        ...

    def body(self, choices: Sequence[Piece], counts: Counts) -> bytes:
        """The whole answer as JSON; a piece is a whole choice."""
        ...

    def writer(self, index: int) -> Writer:
        """The writer of a choice."""
        ...

    def closing(self, counts: Counts) -> bytes:
        """The last events, after all choices have ended."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The last event if the answer fails."""
        ...
