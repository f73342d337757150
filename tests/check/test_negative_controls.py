"""A check that cannot fail proves nothing: each broken promise must turn it red.

The engine under check is paced, and breaks the promise that is switched to ``Broken``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from minisgl_client.client import Client
from minisgl_client.errors import MinisglError

from minisgl_check import refusals
from minisgl_check.asking import Extent
from minisgl_check.canary import Canary
from minisgl_check.endings import endings
from minisgl_check.fault import Fault, Settings, Stage
from minisgl_check.invariants import Invariants
from minisgl_check.kills import killed
from minisgl_check.leavers import Leavers
from minisgl_check.own_server import OwnServer
from minisgl_check.records import Footprints
from minisgl_check.target import Stats, Target
from minisgl_check.waiting import wait_until
from tests.check.promises import Broken

pytestmark = pytest.mark.server
HELD_PROMPT = list(range(40))
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def canary(own: OwnServer) -> Iterator[Canary]:
    canary = Canary(own)
    canary.record()
    yield canary
    canary.close()


def cancel_one(own: OwnServer) -> None:
    with (
        Client(own.grpc_address) as client,
        client.stream(input_ids=HELD_PROMPT, max_tokens=900) as stream,
    ):
        next(stream)


def sound(own: OwnServer) -> Invariants:
    """Invariants that hold before a defect, and are soon violated after it."""
    invariants = Invariants(own)
    assert not invariants.violations()
    return Invariants(own, settles_within_s=0.5)


@pytest.mark.usefixtures("few_inputs")
def test_nothing_is_found_without_a_defect(own: OwnServer, canary: Canary) -> None:
    refusals.send_largest(own)
    invariants = sound(own)
    with canary.watching():
        cases = [*refusals.bad_inputs(own, is_timed=False), endings(own)]
        cancel_one(own)
    assert Invariants(own).violations() == []
    assert [case.failures for case in cases] == [[], [], []]
    assert canary.case().failures == []
    assert invariants.violations() == []


def test_another_token(own: OwnServer, canary: Canary) -> None:
    with own.switch.on(Broken.ANOTHER_TOKEN):
        canary.compare()
    (mismatch,) = canary.mismatches
    assert "is not" in mismatch
    assert canary.case().result == "FAIL"
    canary.mismatches.clear()


@pytest.mark.usefixtures("few_inputs")
def test_an_error_that_tells_a_path(own: OwnServer) -> None:
    with own.switch.on(Broken.PATH):
        for case in refusals.bad_inputs(own, is_timed=False):
            assert any(".py" in failure and "tells" in failure for failure in case.failures)


@pytest.mark.usefixtures("few_inputs")
def test_accepted_nan_is_found(own: OwnServer) -> None:
    with own.switch.on(Broken.NAN):
        over_http, over_grpc = refusals.bad_inputs(own, is_timed=False)
    assert "temperature nan: was answered" in over_grpc.failures
    assert "NaN: was answered" in over_http.failures


def test_a_cancel_that_is_ignored(own: OwnServer) -> None:
    extent = Extent(load_s=0.1, num_cut=1, num_churned=1, is_timed=True)
    with own.switch.on(Broken.CANCEL):
        case = Leavers(own, extent, Random(0)).cancel_alone()
    assert any("freed after" in failure for failure in case.failures)


def test_descriptors_that_leak(own: OwnServer) -> None:
    invariants = sound(own)
    with own.switch.on(Broken.DESCRIPTORS), Client(own.grpc_address) as client:
        client.generate(input_ids=[1], max_tokens=1)
    assert any("descriptors" in one for one in invariants.violations())


@pytest.mark.parametrize(
    ("num_bytes", "violation"),
    [(2**27, "bytes more of shared memory"), (1, "4 regions of shared memory instead of 3")],
)
def test_shared_memory_that_stays(own: OwnServer, num_bytes: int, violation: str) -> None:
    invariants = sound(own)
    region = Path("/dev/shm", f"{own.server.shared_memory_prefix}left")
    with region.open("wb") as file:
        file.truncate(num_bytes)
    try:
        assert any(violation in one for one in invariants.violations())
    finally:
        region.unlink()


def test_an_answer_that_is_held_back(own: OwnServer) -> None:
    invariants = sound(own)
    with own.switch.on(Broken.HELD):
        with Client(own.grpc_address, retries=0) as client, pytest.raises(MinisglError):
            client.generate(input_ids=[1], max_tokens=1, timeout_ms=100)
        assert "llm_engine has num_inside = 1" in invariants.violations()
    sound(own)


def test_two_ends_of_one_answer(own: OwnServer) -> None:
    with own.switch.on(Broken.TWO_ENDS):
        case = endings(own)
    assert "whole: ended 2 times: ['length', 'length']" in case.failures


def test_a_row_that_is_freed_twice(own: OwnServer) -> None:
    sound(own)  # otherwise what still ran would be freed twice, too
    with own.switch.on(Broken.ROW):
        cancel_one(own)
        assert wait_until(lambda: own.stats().engine["scheduler"]["num_running"] < 0, PATIENCE_S)
        found = Invariants(own, settles_within_s=0.5).violations()
    assert any("num_running = -1" in one for one in found), found
    cancel_one(own)
    sound(own)


@pytest.mark.parametrize(
    ("promise", "violation"),
    [
        (Broken.PAGE, "1 of 64 pages are neither free nor cached"),
        (Broken.PREFIX, "cached pages are still held"),
    ],
)
def test_pages_that_do_not_come_back(own: OwnServer, promise: Broken, violation: str) -> None:
    with own.switch.on(promise):
        cancel_one(own)
        assert wait_until(lambda: own.stats().engine["num_open"] == 0, PATIENCE_S)
    found = Invariants(own, settles_within_s=0.5).violations()
    assert any(violation in one for one in found)
    cancel_one(own)
    sound(own)


@dataclass(frozen=True)
class Saying(Target):
    """Not a server: it only reports these counts."""

    told: Mapping[str, object]

    def stats(self) -> Stats:
        return Stats(self.told)


@pytest.mark.parametrize(
    ("kind", "grown", "failure"),
    [
        ("resident_bytes", 100_000_000, "grew by 100 MB of 1000"),
        ("num_threads", 40, "40 more threads than 10"),
        ("num_descriptors", 40, "40 more descriptors than 10"),
    ],
)
def test_what_grows_in_a_long_run(kind: str, grown: int, failure: str) -> None:
    """A soak of sixteen readings; the last four are too large."""
    sound = {"resident_bytes": 1_000_000_000, "num_threads": 10, "num_descriptors": 10}
    counts = ("free_pages", "cached_pages", "num_running", "num_retractions")
    engine = {"model": "llm_engine", "scheduler": dict.fromkeys(counts, 0)}

    def saying(process: dict[str, int]) -> Target:
        return Saying(
            "", "", "", {"tritonserver": process, "models": [engine], "shared_memory_bytes": 0}
        )

    footprints = Footprints(saying(sound))
    for _ in range(11):
        footprints.read(saying(sound))
    assert footprints.case(is_judged=True).failures == []
    for _ in range(4):
        footprints.read(saying({**sound, kind: sound[kind] + grown}))
    assert footprints.case(is_judged=True).failures == [failure]


class Blind(OwnServer):
    """Its health port always says that all is well."""

    def is_ready(self) -> bool:
        return True


def test_a_health_port_that_sees_nothing(own: OwnServer, canary: Canary) -> None:
    blind = Blind(own.grpc_address, own.http_url, own.health_url, own.supervisor)
    settings = Settings(rng=Random(0), is_timed=False, patience_s=0.5)
    stage = Stage(blind, canary, Invariants(own, settles_within_s=0.5), settings)
    kill = killed("tokenizer", num_streams=0)
    case = Fault("F1", "a kill that is not told", kill).tried(stage)
    assert "the health port never said so" in case.failures
    assert wait_until(own.is_ready, PATIENCE_S)
