"""Defects of an engine that was made to have them, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl_backend.build import build_engine
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import EngineFailure
from minisgl_backend.request import SamplingParams
from minisgl_backend.runtime.engine_base import EngineBase
from minisgl_bench.engines import Collector, submitted
from minisgl_check.defect import MARK, Defect, Switch
from minisgl_check.frail import Frailty
from tests.fakes.executor import tokens_of
from tests.waiting import wait_until

OPTIONS = EngineOptions(
    device="cpu",
    num_pages=16,
    max_sequence_length=128,
    max_prefill_tokens=16,
    cache="naive",  # so that each prompt takes three chunks
    max_running_requests=2,  # so that the third one waits while two decode
)


@pytest.fixture
def switch(tmp_path: Path) -> Switch:
    return Switch(tmp_path)


@pytest.fixture
def engine(switch: Switch) -> Iterator[EngineBase]:
    engine = build_engine(OPTIONS, Frailty(switch).parts())
    yield engine
    engine.close(drain_s=0)


def asked(engine: EngineBase, first_token: int, *, seed: int = 0) -> Collector:
    prompt = tokens_of([first_token, *range(10, 50)])
    sampling = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True, seed=seed)
    return submitted(engine, prompt, sampling)


def answers(engine: EngineBase) -> list[list[int]]:
    sinks = [asked(engine, number) for number in range(3)]
    for sink in sinks:
        sink.wait()
    return [sink.tokens for sink in sinks]


@pytest.mark.parametrize(
    "defect",
    [
        Defect.ONE_FORWARD,
        Defect.NO_PAGES_TO_ADMIT,
        Defect.NO_PAGES_BETWEEN_CHUNKS,
        Defect.NO_PAGES_TO_DECODE,
        Defect.PAUSES,
    ],
)
def test_defects_that_no_answer_shows(defect: Defect, engine: EngineBase, switch: Switch) -> None:
    expected = answers(engine)
    with switch.on(defect):
        assert answers(engine) == expected
        if defect is Defect.ONE_FORWARD:
            assert not switch.is_on(defect)
    assert switch.was_met == ("pages vanish" in defect.value)
    wait_until(lambda: engine.stats().scheduler.num_running == 0)
    stats = engine.stats().scheduler
    assert stats.free_pages + stats.cached_pages == stats.total_pages


@pytest.mark.parametrize("defect", [Defect.SAMPLING, Defect.NAN])
def test_a_marked_request_fails_alone(defect: Defect, engine: EngineBase, switch: Switch) -> None:
    expected = answers(engine)
    with switch.on(defect):
        marked = asked(engine, 7, seed=MARK)
        assert answers(engine) == expected
        with pytest.raises(EngineFailure):
            marked.wait()


def test_a_forward_pass_that_breaks_again_fails_its_request(
    engine: EngineBase, switch: Switch
) -> None:
    with switch.on(Defect.EVERY_FORWARD), pytest.raises(EngineFailure, match="broke a step"):
        asked(engine, 7).wait()
