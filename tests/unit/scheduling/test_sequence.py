"""The table of phases."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from minisgl_backend.errors import InvariantError
from minisgl_backend.request import Request, RequestId
from minisgl_backend.scheduling.sequence import TRANSITIONS, Phase, Sequence

WAYS_TO = {
    Phase.WAITING: [],
    Phase.PREFILLING: [Phase.PREFILLING],
    Phase.DECODING: [Phase.PREFILLING, Phase.DECODING],
    Phase.RETIRING: [Phase.PREFILLING, Phase.RETIRING],
    Phase.DONE: [Phase.DONE],
}


def sequence_in(phase: Phase) -> Sequence:
    prompt = np.zeros(1, dtype=np.int32)
    sequence = Sequence(Request(id=RequestId(7), prompt=prompt), (0, 0), prompt)
    for step in WAYS_TO[phase]:
        sequence.enter(step)
    return sequence


@pytest.mark.parametrize(("before", "after"), list(product(Phase, Phase)))
def test_only_the_transitions_of_the_table_are_allowed(before: Phase, after: Phase) -> None:
    sequence = sequence_in(before)
    if after in TRANSITIONS[before]:
        sequence.enter(after)
        assert sequence.phase is after
    else:
        with pytest.raises(InvariantError, match=f"from {before.name} to {after.name}"):
            sequence.enter(after)
        assert sequence.phase is before


def test_every_phase_leads_to_the_end() -> None:
    for phase in Phase:
        reached = {phase}
        for _ in Phase:
            reached |= {after for before in reached for after in TRANSITIONS[before]}
        assert Phase.DONE in reached


def test_a_waiting_sequence_holds_no_pages() -> None:
    with pytest.raises(InvariantError, match="request 7 holds no pages"):
        sequence_in(Phase.WAITING).held()
