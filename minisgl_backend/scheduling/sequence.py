"""The life of one request inside the planner, as a table of phases.

    WAITING      in the queue, or behind its leader; holds no row and no pages
    PREFILLING   has a row, and pages for all its known tokens; not all of these are planned yet
    DECODING     all known tokens are planned; the sequence grows by one token a step
    RETIRING     nothing more is planned; waits until no step in flight can write to its pages
    DONE         holds nothing

Knows the phases and which of them may follow each other. Must not know why a phase changes: the
scheduler decides that. Numbers that change with every step, such as the count of steps in flight,
are columns of ``running.RunningRows``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final, TypeAlias

from minisgl_backend.cache.kv import Lease
from minisgl_backend.errors import InvariantError
from minisgl_backend.plan import NO_SNAPSHOT
from minisgl_backend.request import IntArray, Request

Precedence: TypeAlias = tuple[int, int]
"""A place in the order of service. No two are equal, and the smallest is served first."""


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

    ``tokens``, int32[num_tokens], are the known tokens, those to prefill: the prompt, and the
    output so far if the sequence was retracted. ``row`` and ``lease`` are set from PREFILLING to
    RETIRING. ``returns`` says that RETIRING leads back to WAITING, ``failed`` that logits were not
    finite, so the keys and values must not be shared. ``remapped_at`` is the number of positions
    that were planned when the lease last took pages of others in place of its own; only steps that
    compute later positions read those. ``adapter_slot`` has the adapter while there is a row; the
    plan that announces the row ``loads_adapter``, if it is not there yet. ``num_scored`` counts the
    prompt's tokens whose log-probabilities committed steps have made known.

    Only with recurrent states: ``begins_from`` is the snapshot with which the next chunk begins, if
    it is the first after a cached prefix; ``saves`` are the positions, ascending, after which
    others may want to begin; ``snapshots`` pairs those that were planned with the snapshots kept
    there, until these are known to be finite; ``kept`` is the position, with the snapshot, before
    which the states were kept last while the row decoded.
    """

    request: Request
    precedence: Precedence
    tokens: IntArray
    row: int = -1
    lease: Lease | None = None
    returns: bool = False
    failed: bool = False
    remapped_at: int = -1
    adapter_slot: int = 0
    loads_adapter: bool = False
    num_scored: int = 0
    begins_from: int = NO_SNAPSHOT
    saves: tuple[int, ...] = ()
    snapshots: list[tuple[int, int]] = field(default_factory=list)
    kept: tuple[int, int] | None = None
    _phase: Phase = Phase.WAITING

    @property
    def phase(self) -> Phase:
        """Where the sequence is in its life."""
        return self._phase

    def enter(self, phase: Phase) -> None:
        """Go on to ``phase``. Raises ``InvariantError`` if the table does not allow it."""
        if phase not in TRANSITIONS[self._phase]:
            raise InvariantError(
                f"request {self.request.id} cannot go from {self._phase.name} to {phase.name}"
            )
        self._phase = phase

    @property
    def limit(self) -> int:
        """The largest number of tokens, prompt included, that the sequence may have."""
        return len(self.request.prompt) + self.request.sampling.max_tokens

    @property
    def num_to_score(self) -> int:
        """How many of the prompt's tokens get log-probabilities: all but the first, or none."""
        asked = self.request.sampling.num_prompt_logprobs
        return 0 if asked is None else len(self.request.prompt) - 1

    @property
    def reusable(self) -> IntArray:
        """The known tokens that may come from the cache, but for the last, which is computed.

        The log-probability of a token needs the position before it to be computed.
        """
        if self.num_scored >= self.num_to_score:
            return self.tokens
        return self.tokens[: self.num_scored + 1]

    def held(self) -> Lease:
        """The lease of the sequence. Raises ``InvariantError`` if it has none."""
        if self.lease is None:
            raise InvariantError(f"request {self.request.id} holds no pages")
        return self.lease
