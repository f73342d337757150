"""The life of one request inside the planner, as a table of phases.

    WAITING      in the queue, or behind its leader; holds no row and no pages
    PREFILLING   has a row, and pages for all its known tokens; not all of these are planned yet
    DECODING     all known tokens are planned; the sequence grows by one token per step
    RETIRING     nothing more is planned; waits until no step in flight can write to its pages
    DONE         holds nothing

Knows the phases and which may follow which. Must not know why a phase changes: the scheduler
decides that. Numbers that change with every step, such as the count of steps in flight, are columns
of ``running.RunningRows``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final, TypeAlias

from minisgl_backend.cache.host import HostPrefix
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
    """A request, and what the planner knows about it.

    ``tokens``, int32[num_tokens], are the known tokens, which are to be prefilled: the prompt, and
    the output so far if the sequence ``was_retracted``. ``row`` and ``lease`` are set from
    PREFILLING to RETIRING. ``returns`` says that RETIRING leads back to WAITING; ``failed``, that
    logits were not finite, so the keys and values must not be shared. ``remapped_at`` is the number
    of positions that were planned when the lease last swapped pages of its own for published ones
    of others; only steps that compute later positions read the new pages. While there is a row,
    ``adapter_slot`` is the slot of its adapter, and ``loads_adapter`` says that the plan that
    admits the row must load it. ``num_scored`` counts the prompt tokens whose log-probabilities
    are known by committed steps.

    ``loads`` is what the plan that admits the row loads from main memory, until it does.

    Only with recurrent states: ``begins_from`` is the snapshot from which the next chunk begins, if
    it is the first after a cached prefix. ``saves`` are the positions, ascending, after which
    others may want to begin. ``snapshots`` are pairs of such a position and the snapshot that a
    planned step saves there, or loads, until it is known to be finite. ``kept`` is the last
    position before which the decoding row's states were kept, and the snapshot.
    """

    request: Request
    precedence: Precedence
    tokens: IntArray
    row: int = -1
    lease: Lease | None = None
    returns: bool = False
    was_retracted: bool = False
    failed: bool = False
    remapped_at: int = -1
    adapter_slot: int = 0
    loads_adapter: bool = False
    num_scored: int = 0
    loads: HostPrefix | None = None
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
        """Number of prompt tokens that get log-probabilities: all but the first, or none."""
        asked = self.request.sampling.num_prompt_logprobs
        return 0 if asked is None else len(self.request.prompt) - 1

    @property
    def reusable(self) -> IntArray:
        """The known tokens up to and including the first that must be computed; those before it may
        come from the cache.

        To score a token, the position before it must be computed.
        """
        if self.num_scored >= self.num_to_score:
            return self.tokens
        return self.tokens[: self.num_scored + 1]

    def held(self) -> Lease:
        """The lease of the sequence. Raises ``InvariantError`` if it has none."""
        if self.lease is None:
            raise InvariantError(f"request {self.request.id} holds no pages")
        return self.lease


def by_precedence(sequence: Sequence) -> Precedence:
    """The key by which sequences are sorted: the first is served first."""
    return sequence.precedence
