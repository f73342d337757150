"""Two real engines in their own processes: the same tokens and cached prefixes as with one, and
what happens to requests when one is killed."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pytest

from minisgl_backend.build import build_engine
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError, EngineFailure, Overloaded
from minisgl_backend.offline.llm import LLM
from minisgl_backend.replicas import process as replica_process
from minisgl_backend.replicas.messages import Message
from minisgl_backend.replicas.process import ReplicaPlace, ReplicaProcess
from minisgl_backend.replicas.start import cpu_places, gpu_places, start_replicas
from minisgl_backend.request import (
    Embedded,
    Event,
    Failed,
    Finished,
    FinishReason,
    IntArray,
    Request,
    RequestId,
    SamplingParams,
    samples_of,
)
from minisgl_backend.runtime.engine_base import EngineBase
from minisgl_check.processes import children_of, is_rank, runs
from tests.parallel.engines import WAIT_S, Answer, some_prompts, wait_for_all
from tests.waiting import wait_until

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float64", "num_pages": 1024}
ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True)
SAMPLINGS = [
    SamplingParams(max_tokens=16, temperature=0.0),
    SamplingParams(max_tokens=16, temperature=0.8, seed=5),
    SamplingParams(max_tokens=16, temperature=1.1, top_p=0.9, seed=6, num_logprobs=2),
    SamplingParams(max_tokens=3, seed=7, num_prompt_logprobs=1),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineBase]:
    """Two replicas. Tests may kill one if they wait until both are back."""
    engine = build_engine(EngineOptions(data_parallel_size=2, **OPTIONS))
    try:
        yield engine
        pids = pids_of(engine)
    finally:
        engine.close(drain_s=0)
    assert not any(map(runs, pids))


@pytest.fixture(scope="module")
def alone() -> Iterator[EngineBase]:
    engine = build_engine(EngineOptions(**OPTIONS))
    try:
        yield engine
    finally:
        engine.close(drain_s=0)


def pids_of(engine: EngineBase) -> list[int]:
    return [replica.pid for replica in engine.replicas() if replica.pid is not None]


def all_are_up(engine: EngineBase) -> bool:
    return all(replica.is_up for replica in engine.replicas())


def submit(
    engine: EngineBase, prompt: IntArray, sampling: SamplingParams, *, n: int = 1, **fields: Any
) -> list[Answer]:
    answers = [Answer(engine.new_id()) for _ in range(n)]
    ids = [answer.request_id for answer in answers]
    request = Request(id=ids[0], prompt=prompt, sampling=sampling, **fields)
    engine.submit_samples(samples_of(request, ids), answers)
    return answers


def answered(engine: EngineBase, **fields: Any) -> list[Answer]:
    prompts = some_prompts(24, vocab_size=engine.info.vocab_size)
    answers = [
        answer
        for index, prompt in enumerate(prompts)
        for answer in submit(engine, prompt, SAMPLINGS[index % 4], n=1 + index % 2, **fields)
    ]
    wait_for_all(answers)
    assert all(answer.error is None for answer in answers)
    return answers


def test_tokens_are_those_of_one_engine(engine: EngineBase, alone: EngineBase) -> None:
    """So are their log-probabilities, and those of prompts."""
    before = [replica.num_routed for replica in engine.replicas()]
    expected = answered(alone)
    for answer, other in zip(answered(engine), expected, strict=True):
        assert answer.tokens == other.tokens
        assert answer.reason == other.reason
        assert [one and one.rank for one in answer.logprobs] == [
            one and one.rank for one in other.logprobs
        ]
        for one, two in zip(answer.prompt_logprobs, other.prompt_logprobs, strict=True):
            assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
            assert one.alternatives[0][0] == two.alternatives[0][0]
    routed = [replica.num_routed for replica in engine.replicas()]
    assert all(now > then for now, then in zip(routed, before, strict=True))


def test_an_embedding_is_that_of_one_engine(engine: EngineBase, alone: EngineBase) -> None:
    prompt = np.arange(30, dtype=np.int32)
    vectors = []
    for each in (engine, alone):
        found, ended = list[Event](), threading.Event()

        def sink(event: Event, found: list[Event] = found, ended: threading.Event = ended) -> None:
            found.append(event)
            if isinstance(event, Finished | Failed):
                ended.set()

        each.submit(
            Request(
                id=each.new_id(), prompt=prompt, sampling=SamplingParams(max_tokens=0, embed=True)
            ),
            sink,
        )
        assert ended.wait(60)
        vectors += [event.vector for event in found if isinstance(event, Embedded)]
    assert np.allclose(vectors[0], vectors[1], atol=1e-5)


def conversations(engine: EngineBase) -> float:
    """The share of prompt tokens found cached in parallel conversations of several turns; each
    begins with one of two system prompts, and the tokens are the same in each call."""
    num_turns, num_talks = 5, 8
    rng = np.random.default_rng(3)
    systems = [rng.integers(0, 2000, 100).astype(np.int32) for _ in range(2)]
    talks = [systems[talk % 2] for talk in range(num_talks)]
    before = engine.stats().scheduler
    for _ in range(num_turns):
        additions = [rng.integers(0, 2000, 50).astype(np.int32) for _ in talks]
        talks = [np.concatenate(pair) for pair in zip(talks, additions, strict=True)]
        answers = [
            submit(engine, talk, SamplingParams(max_tokens=8, seed=1, ignore_eos=True))[0]
            for talk in talks
        ]
        wait_for_all(answers)
        talks = [
            np.concatenate([talk, np.array(answer.tokens, np.int32)])
            for talk, answer in zip(talks, answers, strict=True)
        ]
    lengths = [100 + 50 * turn + 8 * (turn - 1) for turn in range(1, num_turns + 1)]
    total = num_talks * sum(lengths)
    wait_until(lambda: engine.stats().scheduler.prefix_queries - before.prefix_queries >= total)
    after = engine.stats().scheduler
    return (after.prefix_hits - before.prefix_hits) / (after.prefix_queries - before.prefix_queries)


def test_conversations_find_what_the_main_memory_of_a_replica_has() -> None:
    """They come back when its pages have gone to others."""
    few = {**OPTIONS, "num_pages": 28, "data_parallel_size": 2}
    shares = []
    for gib in (0.0, 0.1):
        engine = build_engine(EngineOptions(host_cache_gib=gib, **few))
        try:
            shares.append(conversations(engine))
            loaded = [each.stats.scheduler.host_loaded_tokens for each in engine.replicas()]
            assert (min(loaded) > 0) == (gib > 0)
        finally:
            engine.close(drain_s=0)
    assert shares[1] > shares[0] + 0.1


def test_conversations_find_as_much_cached_as_in_one_engine(
    engine: EngineBase, alone: EngineBase
) -> None:
    found, expected = conversations(engine), conversations(alone)
    assert expected > 0.6
    assert found >= expected - 0.01


def test_a_cancel_and_a_deadline_reach_the_replica(engine: EngineBase) -> None:
    prompts = some_prompts(6, vocab_size=2000, seed=9)
    answers = [submit(engine, prompt, ENDLESS)[0] for prompt in prompts]
    for answer in answers:
        assert answer.started.wait(60)
        engine.abort(answer.request_id)
    engine.abort(RequestId(10**9))
    wait_for_all(answers)
    assert {answer.reason for answer in answers} == {FinishReason.CANCELLED}
    (late,) = submit(engine, prompts[0], ENDLESS, deadline_s=time.monotonic() + 0.5)
    wait_for_all([late])
    assert late.reason is FinishReason.TIMEOUT or isinstance(late.error, Overloaded)
    wait_until(lambda: engine.stats().scheduler.num_running == 0)
    assert engine.stats().num_open == 0


def test_counts_of_all_are_the_sums_of_each(engine: EngineBase) -> None:
    before = engine.stats()
    answers = answered(engine)
    num_tokens = sum(len(answer.tokens) for answer in answers)
    wait_until(
        lambda: (
            engine.stats().num_generated_tokens >= before.num_generated_tokens + num_tokens
            and engine.stats().scheduler.num_running == 0
        )
    )
    whole, each = engine.stats(), [replica.stats for replica in engine.replicas()]
    assert sum(one.num_generated_tokens for one in each) == whole.num_generated_tokens
    assert sum(one.scheduler.total_pages for one in each) == whole.scheduler.total_pages == 2048
    assert len(engine.take_observations().e2e_latency_s) > 0


@dataclass(frozen=True, slots=True)
class Ended:
    """How many requests ended in which way, and which of those that ended well were wrong."""

    num_well: int
    num_failed: int
    wrong: list[Answer]


def ends(answers: Sequence[Answer], expected: Sequence[Answer]) -> Ended:
    well = [answer for answer in answers if answer.error is None]
    failed = [answer for answer in answers if answer.error is not None]
    assert all(isinstance(answer.error, EngineFailure) for answer in failed)
    by_id = {answer.request_id: other for answer, other in zip(answers, expected, strict=True)}
    wrong = [answer for answer in well if answer.tokens != by_id[answer.request_id].tokens]
    return Ended(len(well), len(failed), wrong)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_replica_takes_only_what_it_had_begun(
    engine: EngineBase, alone: EngineBase, number: signal.Signals
) -> None:
    prompts = some_prompts(40, vocab_size=2000, seed=4)
    sampling = SamplingParams(max_tokens=60, seed=2, ignore_eos=True)
    expected = [submit(alone, prompt, sampling)[0] for prompt in prompts]
    wait_for_all(expected)
    starts = [replica.num_starts for replica in engine.replicas()]
    answers = [submit(engine, prompt, sampling)[0] for prompt in prompts]
    assert answers[0].started.wait(60)
    victim = pids_of(engine)[0]
    os.kill(victim, number)
    later = [submit(engine, prompt, sampling)[0] for prompt in prompts[:10]]
    wait_for_all([*answers, *later])
    ended = ends([*answers, *later], [*expected, *expected[:10]])
    assert not ended.wrong
    assert ended.num_failed < len(answers)
    assert ended.num_well >= 1
    wait_until(  # maybe nothing waited for it any more, so its end is noticed later
        lambda: [replica.num_starts for replica in engine.replicas()] == [starts[0] + 1, starts[1]]
    )
    wait_until(lambda: all_are_up(engine))
    assert not runs(victim)
    again = [submit(engine, prompt, sampling)[0] for prompt in prompts]
    wait_for_all(again)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in expected]
    assert engine.health().ready
    assert engine.stats().num_open == 0


def test_a_drain_ends_what_is_open_and_then_the_processes() -> None:
    engine = build_engine(EngineOptions(data_parallel_size=2, **OPTIONS))
    pids = pids_of(engine)
    prompts = some_prompts(8, vocab_size=2000, seed=1)
    short = [submit(engine, p, SamplingParams(max_tokens=30, ignore_eos=True))[0] for p in prompts]
    (endless,) = submit(engine, prompts[0], ENDLESS)
    assert endless.started.wait(60)
    wait_until(lambda: all(answer.started.is_set() for answer in short))
    closing = threading.Thread(target=lambda: engine.close(drain_s=600))
    closing.start()
    wait_until(lambda: not engine.health().ready)
    with pytest.raises(Overloaded, match="shutting down"):
        submit(engine, prompts[0], ENDLESS)
    wait_for_all(short)
    engine.close(drain_s=0)  # the time for the drain is over
    wait_for_all([endless])
    closing.join()
    assert all(answer.reason is FinishReason.LENGTH for answer in short)
    assert endless.reason is FinishReason.LENGTH or isinstance(endless.error, Overloaded)
    assert not any(map(runs, pids))


def test_ranks_of_replicas() -> None:
    """Each replica has two ranks; one of them is lost, and its replica with it."""
    options = EngineOptions(
        data_parallel_size=2, tensor_parallel_size=2, distributed_timeout_s=5, **OPTIONS
    )
    engine = build_engine(options)
    try:
        prompts = some_prompts(4, vocab_size=2000, seed=2)
        answers = [submit(engine, prompt, SAMPLINGS[0])[0] for prompt in prompts]
        wait_for_all(answers)
        assert all(answer.error is None for answer in answers)
        first = engine.replicas()[0].pid
        assert first is not None
        (rank,) = [pid for pid in children_of(first) if is_rank(pid)]
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: engine.replicas()[0].num_starts == 2)
        again = [submit(engine, prompt, SAMPLINGS[0])[0] for prompt in prompts]
        wait_for_all(again)
        assert [answer.tokens for answer in again] == [answer.tokens for answer in answers]
    finally:
        engine.close(drain_s=0)


def test_a_replica_that_cannot_start_is_named() -> None:
    options = EngineOptions(data_parallel_size=2, **OPTIONS)
    with pytest.raises(ConfigError, match=r"replica [01]: its process ended"):
        start_replicas(options, "minisgl_backend.no_such_module")


def test_a_replica_that_cannot_start_ends_the_start_while_others_load() -> None:
    options, before = EngineOptions(data_parallel_size=2, **OPTIONS), children_of(os.getpid())
    with pytest.raises(ConfigError, match="replica 1: its GPU is taken"):
        start_replicas(options, "tests.replicas.failing_replica")
    assert set(children_of(os.getpid())) <= set(before)


def test_a_process_that_the_system_does_not_start_is_a_config_error() -> None:
    replica = ReplicaProcess(1, ["/nonexistent"], ReplicaPlace(environment={}), {})
    replica.start()
    with pytest.raises(ConfigError, match=r"its process cannot be started: .*/nonexistent"):
        replica.started.result(60)
    replica.close()


class BrokenOwner:
    """Cannot take anything from a replica that serves."""

    def __init__(self) -> None:
        self.was_lost = threading.Event()
        self.was_last = False

    def joined(self, replica: int) -> None:
        raise ValueError("no place for it")

    def take(self, replica: int, message: Message) -> None:
        raise AssertionError("it has not joined")

    def lost(self, replica: int, *, is_last: bool) -> None:
        self.was_last = is_last
        self.was_lost.set()


def test_an_error_of_the_parent_is_not_taken_for_a_start_that_failed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_process, "_MOST_FAILURES", 1)
    options = asdict(EngineOptions(**{**OPTIONS, "num_pages": 64}))
    command = [sys.executable, "-m", "minisgl_backend.replica"]
    replica, owner = (
        ReplicaProcess(0, command, ReplicaPlace(environment={}), options),
        BrokenOwner(),
    )
    replica.serve(owner)
    replica.start()
    try:
        assert owner.was_lost.wait(WAIT_S)
        assert not owner.was_last
    finally:
        replica.close()
    assert "replica 0 is ended after an internal error" in caplog.text
    assert "no place for it" in caplog.text and "cannot start" not in caplog.text


def test_nothing_is_sent_to_a_process_before_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may send a message while a new process is started."""
    queues: list[queue.SimpleQueue[Any]] = []

    class Slow(queue.SimpleQueue[Any]):
        def __init__(self) -> None:
            super().__init__()
            queues.append(self)

        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            if "options" in item:
                replica.send({"cancel": 1})
            super().put(item)

    replica = ReplicaProcess(1, ["/nonexistent"], ReplicaPlace(environment={}), {})
    monkeypatch.setattr(queue, "SimpleQueue", Slow)
    with pytest.raises(ConfigError, match="cannot be started"):
        replica._serve()
    (made,) = queues
    assert made.get() == {"options": {}} and made.empty()


def test_a_replica_without_a_thread_ends_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = ReplicaProcess.start

    def start(replica: ReplicaProcess) -> None:
        if replica.number == 1:
            raise RuntimeError("can't start new thread")  # as Python says at a limit
        begin(replica)

    options, before = EngineOptions(data_parallel_size=2, **OPTIONS), children_of(os.getpid())
    monkeypatch.setattr(ReplicaProcess, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start_replicas(options, "tests.replicas.failing_replica")
    assert set(children_of(os.getpid())) <= set(before)


def test_what_does_not_go_with_replicas_is_refused_by_name() -> None:
    for wrong, message in (
        ({"routing_ratio": 1.5}, "routing_ratio is for data_parallel_size of 2 and more"),
        ({"routing_slack": 0.5}, "routing_slack is for data_parallel_size of 2 and more"),
        ({"data_parallel_size": 2, "cache": "naive"}, "cache=naive does not go with"),
        (
            {
                "data_parallel_size": 2,
                "tensor_parallel_size": 2,
                "rendezvous": "127.0.0.1:5",
            },
            "rendezvous does not go with data_parallel_size",
        ),
    ):
        options = EngineOptions.from_mapping({"device": "cpu", "num_pages": 8, **wrong})
        with pytest.raises(ConfigError, match=message):
            build_engine(options)


def test_llm_with_replicas_gives_the_same_texts() -> None:
    prompts = ["The capital of France is", "Hello", "One, two, three,"]
    params = {"max_tokens": 12, "temperature": 0.0}
    with LLM(**OPTIONS) as llm:
        expected = [output.text for output in llm.generate(prompts, params)]
    with LLM(data_parallel_size=2, **OPTIONS) as llm:
        assert [output.text for output in llm.generate(prompts, params)] == expected
        assert llm.info.num_replicas == 2


def test_each_replica_has_its_own_gpus_and_cores() -> None:
    names = [place.environment["CUDA_VISIBLE_DEVICES"] for place in gpu_places(2, 2, {})]
    assert names == ["0,1", "2,3"]
    seen = {"CUDA_VISIBLE_DEVICES": "5,3,GPU-a"}
    names = [place.environment["CUDA_VISIBLE_DEVICES"] for place in gpu_places(3, 1, seen)]
    assert names == ["5", "3", "GPU-a"]
    assert [set(place.cores) for place in cpu_places(2, [0, 2, 4, 6, 7])] == [{0, 2}, {4, 6}]
    assert [set(place.cores) for place in cpu_places(3, [1, 5])] == [{1}, {5}, {1}]
