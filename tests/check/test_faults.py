"""The faults in the catalogue that take a second each; `minisgl check --full` tries the others.

The engine is the real one with defects that can be switched on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from random import Random

import pytest

from minisgl_check import breaks, nodes
from minisgl_check.catalogue import SCENES
from minisgl_check.defect import Switch
from minisgl_check.fault import Fault, Settings, Stage
from minisgl_check.model_files import DAMAGES, damaged, load_error

pytestmark = pytest.mark.server

QUICK = {
    "one forward pass raises",
    "sampling for one request raises",
    "NaN in the logits of one request",
    "pages vanish when a request waits for its prefill",
    "pages vanish between the chunks of a prompt",
    "pages vanish while requests decode",
    "a deadline passes in the queue",
    "one id twice, stops of unknown and ended ids",
}
FAULTS = [fault for scene in SCENES for fault in scene.faults if fault.sentence in QUICK]


@pytest.fixture(scope="module")
def frail() -> Iterator[Stage]:
    with breaks.frail_stage(Settings(rng=Random(0), is_timed=False)) as stage:
        yield stage


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.sentence)
def test_a_fault_is_survived(frail: Stage, fault: Fault[Stage]) -> None:
    case = fault.tried(frail)
    assert case.failures == []
    assert case.count > 0


def test_a_fault_that_needs_another_machine_is_skipped_if_there_can_be_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes, "can_have_machines", lambda: False)
    (fault,) = [fault for fault in nodes.FAULTS if "cable" in fault.sentence]
    case = fault.tried(Settings(rng=Random(0), is_timed=False))
    assert (case.result, case.what) == ("skipped", "a cable takes root and iproute2")


def test_each_quick_fault_is_in_the_catalogue() -> None:
    assert {fault.sentence for fault in FAULTS} == QUICK


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_model_is_not_loaded(name: str) -> None:
    damage, cause = DAMAGES[name]
    with damaged(damage) as folder:
        error = load_error(folder)
    assert error is not None and cause in error
    assert "\n" not in error


@pytest.mark.parametrize("provoke", [breaks.sampling_raises, breaks.logits_are_nan])
def test_a_fault_that_did_not_happen_is_no_pass(
    frail: Stage, provoke: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Switch, "on", lambda switch, defect: nullcontext())
    (fault,) = [fault for fault in FAULTS if fault.provoke is provoke]
    assert "0 failed" in fault.tried(frail).failures
