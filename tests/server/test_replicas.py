"""A server whose engine has two replicas: their metrics and counts, and what happens to requests
when one or all are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from minisgl_backend.server.repository import shipped_repository
from minisgl_check.processes import runs
from tests.server.client import Call, Metrics, Refused, wait_for
from tests.server.client import text_of as joined
from tests.server.test_supervision import PATIENCE_S, Supervised
from tests.waiting import wait_until

OPTIONS = {"data_parallel_size": "2", "num_pages": "2048", "drain_timeout_s": "1"}
LONG: dict[str, Any] = {"max_tokens": 7000, "ignore_eos": True, "stream": True}
"""Takes seconds, so that even on a busy machine no stream ends before its replica is killed."""
LOST = "INTERNAL: the replica that served the request has ended"


@pytest.fixture(scope="module")
def world() -> Iterator[Supervised]:
    it = Supervised(shipped_repository(), OPTIONS)
    try:
        yield it
        last = pids_of(it)
    finally:
        it.close()
    wait_until(lambda: not any(map(runs, last)))


def replicas_of(world: Supervised) -> list[dict[str, Any]]:
    return list(world.stats("llm_engine")["replicas"])


def pids_of(world: Supervised) -> list[int]:
    return [replica["pid"] for replica in replicas_of(world) if replica["pid"] is not None]


def keep_on_one_core(pid: int) -> None:
    """Keep a replica on one core, so that this process can run and see answers before they end."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {max(os.sched_getaffinity(0))})


def text_of(world: Supervised, prompt: str) -> str:
    with Call(world.server, "minisgl", text_input=prompt, max_tokens=20, temperature=0.0) as call:
        return joined(call.all())


def ending(call: Call) -> str | None:
    """The error that a stream ends with, if any."""
    with call:
        try:
            call.all()
        except Refused as error:
            return error.message[error.message.find("INTERNAL") :]
        return None


def test_metrics_and_counts_are_of_all_and_of_each(world: Supervised) -> None:
    prompts = [f"{number} is the number of" for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda prompt: text_of(world, prompt), prompts))
    assert texts == [text_of(world, prompt) for prompt in prompts]
    replicas = replicas_of(world)
    routed = [replica["num_routed"] for replica in replicas]
    assert sum(routed) >= 16 and all(routed)
    assert all(replica["is_up"] for replica in replicas)
    assert world.stats("llm_engine")["info"]["num_replicas"] == 2

    def are_told() -> bool:
        metrics = Metrics(world.server)
        each = [
            metrics.labelled("minisgl:replica_generation_tokens_total", "replica", number)
            for number in "01"
        ]
        return all(each) and sum(each) == metrics["vllm:generation_tokens_total"]

    wait_for(are_told, "the metrics of both replicas")


def test_a_killed_replica_costs_only_its_own_streams(world: Supervised) -> None:
    """The server stays ready, and no model is loaded again."""
    before, server = world.num_recoveries(), world.server
    stats = world.stats("llm_engine")
    num_failed, num_cancelled = stats["failed"].get("INTERNAL", 0), stats["num_cancelled"]
    victim, other = pids = pids_of(world)
    for pid in pids:
        keep_on_one_core(pid)
    lost: list[Call] = []
    kept: list[Call] = []
    for number in range(6):
        num_routed = replicas_of(world)[0]["num_routed"]
        call = Call(world.server, "llm_engine", **LONG, input_ids=[number, 2, 3])
        assert call.next(PATIENCE_S) is not None
        is_hit = replicas_of(world)[0]["num_routed"] > num_routed
        (lost if is_hit else kept).append(call)
    assert lost and kept
    os.kill(victim, signal.SIGKILL)
    assert list(map(ending, lost)) == [LOST] * len(lost)
    for call in kept:
        assert call.next() is not None
        call.cancel()
    assert world.get("/ready")[0] == 200
    assert text_of(world, "Hello")
    wait_for(lambda: all(one["is_up"] for one in replicas_of(world)), "the replica", PATIENCE_S)
    assert not runs(victim) and runs(other)
    assert world.num_recoveries() == before and world.server is server
    assert [replica["num_starts"] for replica in replicas_of(world)] == [2, 1]
    wait_for(lambda: world.stats("llm_engine")["num_open"] == 0, "the end of all", PATIENCE_S)
    stats = world.stats("llm_engine")
    assert stats["failed"]["INTERNAL"] == num_failed + len(lost)
    assert stats["num_cancelled"] == num_cancelled + len(kept)


def test_replicas_end_with_the_engines_process(world: Supervised) -> None:
    before, pids = world.num_recoveries(), pids_of(world)
    os.kill(world.stats("llm_engine")["pid"], signal.SIGKILL)
    world.wait_recovered(before)
    wait_until(lambda: not any(map(runs, pids)))
    assert text_of(world, "Hello")
