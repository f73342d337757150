"""``Lookahead``: what the planner asks about the next tokens of answers that follow a grammar.

Must not know how a grammar is followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from minisgl_backend.request import RequestId, TokenId


class Lookahead(Protocol):
    """The grammars of live requests, after all tokens that are committed."""

    def forced(self, request_id: RequestId) -> Sequence[TokenId]:
        """The next tokens of the request's answer, as far as its grammar leaves no choice."""

    def allowed(self, request_id: RequestId, guesses: Sequence[TokenId]) -> int:
        """How many of ``guesses``, from the first on, may come next and leave something to come.

        No step with the request may be in flight.
        """
