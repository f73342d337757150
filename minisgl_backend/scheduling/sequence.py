"""The life of one request inside the planner, as a table of phases.

    WAITING      in the queue; holds no row and no pages
    PREFILLING   has a row and pages for all its known tokens; not all of them are planned yet
    DECODING     all known tokens are planned; grows by one token a step
    RETIRING     nothing more is planned; waits until no step in flight can write to its pages
    DONE         holds nothing

Knows the phases and which of them may follow each other. Must not know why they change: that is the
scheduler's. Numbers that change with every step are columns of ``rows.Rows``, ``in_flight`` too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final, TypeAlias

from minisgl_backend.cache.kv import Lease
from minisgl_backend.errors import InvariantError
from minisgl_backend.request import IntArray, Request

Precedence: TypeAlias = tuple[int, int]
"""Place in the order of service, unique; the smallest goes first."""


class Phase(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    RETIRING = "retiring"
    DONE = "done"


TRANSITIONS: Final[Mapping[Phase, frozenset[Phase]]] = MappingProxyType(
    {
        Phase.WAITING: frozenset({Phase.PREFILLING, Phase.DONE}),
        Phase.PREFILLING: frozenset({Phase.DECODING, Phase.RETIRING}),
        Phase.DECODING: frozenset({Phase.RETIRING}),
        Phase.RETIRING: frozenset({Phase.WAITING, Phase.DONE}),  # WAITING: it was retracted
        Phase.DONE: frozenset(),
    }
)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request, and what the planner knows of it.

    ``tokens`` int32[num_tokens] are those to prefill: the prompt, and the output so far where the
    sequence was retracted and comes back. ``row`` and ``lease`` are set from PREFILLING to
    RETIRING. ``returns`` says that RETIRING leads back to WAITING; ``failed``, that its KV cannot
    be trusted.
    """

    request: Request
    precedence: Precedence
    tokens: IntArray
    row: int = -1
    lease: Lease | None = None
    returns: bool = False
    failed: bool = False
    overtaken: int = 0
    _phase: Phase = Phase.WAITING

    @property
    def phase(self) -> Phase:
        """Where it is in its life."""
        return self._phase

    def enter(self, phase: Phase) -> None:
        """Go on to ``phase``; raises ``InvariantError`` where the table does not allow it."""
        if phase not in TRANSITIONS[self._phase]:
            raise InvariantError(
                f"request {self.request.id} cannot go from {self._phase.name} to {phase.name}"
            )
        self._phase = phase

    @property
    def limit(self) -> int:
        """Tokens after which it ends, prompt included."""
        return len(self.request.prompt) + self.request.sampling.max_tokens

    def held(self) -> Lease:
        """Its lease; raises ``InvariantError`` where it has none."""
        if self.lease is None:
            raise InvariantError(f"request {self.request.id} holds no pages")
        return self.lease
