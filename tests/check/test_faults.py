"""Faults of the catalogue that take a second each; the others are for `minisgl check --full`.

The engine is the real one with defects that can be switched on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from random import Random

import pytest

from minisgl_backend.check import breaks
from minisgl_backend.check.callers import deadline_in_the_queue, one_id_twice
from minisgl_backend.check.catalogue import SCENES
from minisgl_backend.check.fault import Fault, Settings, Stage

pytestmark = pytest.mark.server

QUICK = {
    breaks.one_forward_raises,
    breaks.sampling_raises,
    breaks.logits_are_nan,
    breaks.few_pages,
    deadline_in_the_queue,
    one_id_twice,
}
FAULTS = [fault for scene in SCENES for fault in scene.faults if fault.provoke in QUICK]


@pytest.fixture(scope="module")
def frail() -> Iterator[Stage]:
    with breaks.frail_stage(Settings(rng=Random(0), is_timed=False)) as stage:
        yield stage


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.number)
def test_a_fault_is_survived(frail: Stage, fault: Fault[Stage]) -> None:
    case = fault.tried(frail)
    assert case.failures == []
    assert case.count > 0


@pytest.mark.parametrize("provoke", [breaks.sampling_raises, breaks.logits_are_nan])
def test_a_fault_that_did_not_happen_is_no_pass(
    frail: Stage, provoke: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaks, "switched_on", lambda defect, server: nullcontext())
    (fault,) = [fault for fault in FAULTS if fault.provoke is provoke]
    assert "0 failed" in fault.tried(frail).failures
