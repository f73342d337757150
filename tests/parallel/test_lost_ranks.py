"""A rank that dies or hangs ends every open request with an error, and the engine with it."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from minisgl_backend.build import build_executor
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError, EngineFailure, Overloaded
from minisgl_backend.execution import sampling
from minisgl_backend.execution.followers import Followers
from minisgl_backend.execution.forward import ForwardPass
from minisgl_backend.execution.sampling import Sampler
from minisgl_backend.kernels.sampling import best_of_part, sample
from minisgl_backend.kernels.sampling_table import Samples
from minisgl_backend.parallel.place import RankPlace
from minisgl_backend.plan import Admission
from minisgl_backend.request import SamplingParams
from minisgl_check.processes import runs
from tests.parallel.engines import (
    Answer,
    Ranked,
    ranked_engine,
    wait_for_all,
)
from tests.waiting import wait_until

ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True)
PROMPT = np.arange(40, dtype=np.int32)
OPTIONS: dict[str, Any] = {"num_pages": 2000, "distributed_timeout_s": 4}


def start_four(ranked: Ranked) -> list[Answer]:
    """Start requests that would run for long; returns when each has its first token."""
    answers = [ranked.submit(PROMPT + index, ENDLESS) for index in range(4)]
    for answer in answers:
        assert answer.started.wait(120)
    return answers


def check_all_failed(ranked: Ranked, answers: list[Answer]) -> None:
    """Every request has its error, and no other is accepted."""
    wait_for_all(answers)
    assert all(isinstance(answer.error, EngineFailure) for answer in answers)
    wait_until(lambda: not ranked.engine.health().ready)
    with pytest.raises(Overloaded, match="the engine is down"):
        ranked.submit(PROMPT, ENDLESS)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank_fails_every_open_request(number: signal.Signals) -> None:
    with ranked_engine(2, **OPTIONS) as ranked:
        answers = start_four(ranked)
        ranked.kill(1, number)
        check_all_failed(ranked, answers)


def test_a_rank_that_dies_while_nothing_runs_is_noticed() -> None:
    """Its ranks meet where the operator says."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with ranked_engine(2, rendezvous=address, **OPTIONS) as ranked:
        ranked.kill(1, signal.SIGKILL)
        check_all_failed(ranked, [])


def test_a_rank_that_hangs_while_nothing_runs_is_noticed() -> None:
    with ranked_engine(2, **OPTIONS) as ranked:
        wait_for_all([ranked.submit(PROMPT, SamplingParams(max_tokens=2))])
        ranked.kill(1, signal.SIGSTOP)
        check_all_failed(ranked, [])


POISON = 666
"""The seed of requests that break the step that samples them."""


@pytest.mark.parametrize("top_k", [0, 5], ids=["all ranks sample", "rank 0 samples"])
def test_a_request_that_breaks_a_step_of_all_ranks_fails_alone(
    top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If rank 0 breaks while it samples, it must not leave the others behind."""
    break_sampling(monkeypatch)
    with ranked_engine(2, **{**OPTIONS, "distributed_timeout_s": 60}) as ranked:
        alone = ranked.submit(PROMPT, SamplingParams(max_tokens=20, seed=1, top_k=top_k))
        wait_for_all([alone])
        answers = [
            ranked.submit(PROMPT, SamplingParams(max_tokens=20, seed=seed, top_k=top_k))
            for seed in (1, POISON, 1)
        ]
        wait_for_all(answers)
        assert isinstance(answers[1].error, EngineFailure)
        for answer in (answers[0], answers[2]):
            assert answer.error is None
            assert answer.tokens == alone.tokens
        assert ranked.engine.health().ready


def break_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Sampler.admit
    poisoned: set[int] = set()

    def admit_and_look(self: Sampler, admissions: Sequence[Admission]) -> None:
        for admission in admissions:
            poisoned.discard(admission.row)
            if admission.sampling.seed == POISON:
                poisoned.add(admission.row)
        admit(self, admissions)

    def or_break(work: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def checked(logits: Tensor, table: Any, samples: Samples, *others: Any) -> Tensor:
            if poisoned & set(samples.rows.tolist()):
                raise ValueError("poisoned")
            return work(logits, table, samples, *others)

        return checked

    monkeypatch.setattr(Sampler, "admit", admit_and_look)
    for work in (sample, best_of_part):
        monkeypatch.setattr(sampling, work.__name__, or_break(work))


def test_a_step_that_breaks_on_one_rank_only_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other rank waits in a sum, and no rank may join it with another step."""
    with ranked_engine(2, **OPTIONS) as ranked:
        wait_for_all([ranked.submit(PROMPT, SamplingParams(max_tokens=2))])

        def broken(*_: object) -> None:
            raise ValueError("no forward pass")

        monkeypatch.setattr(ForwardPass, "over_batch", broken)
        check_all_failed(ranked, [ranked.submit(PROMPT, ENDLESS)])


_LEADER = """\
import sys, time
from minisgl_backend.build import build_executor
from minisgl_backend.config import EngineOptions

if __name__ == "__main__":
    options = EngineOptions(tensor_parallel_size=2, device="cpu", num_pages=8)
    _, executor = build_executor(options)
    print(*executor.followers.pids, flush=True)
    time.sleep(600)
"""


def test_followers_die_with_their_leader_even_while_they_are_stopped() -> None:
    leader = subprocess.Popen(
        [sys.executable, "-c", _LEADER],
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL,
    )
    with leader:
        assert leader.stdout is not None
        follower = int(leader.stdout.readline())
        os.kill(follower, signal.SIGSTOP)
        leader.kill()
    wait_until(lambda: not runs(follower))


def follower_of(script: str, *, size: int = 2) -> Followers:
    """Followers that run this script; ``rank0`` is their end of the channel."""
    prelude = """\
    import os, socket, sys
    from minisgl_backend.execution.rank_channel import HostFollowerEnd
    rank0 = HostFollowerEnd(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    """
    text = textwrap.dedent(prelude) + textwrap.dedent(script)
    place = RankPlace.first(size, "127.0.0.1:1")  # no rank goes there
    return Followers(place, [sys.executable, "-c", text])


def test_the_start_in_step() -> None:
    script = """\
    assert rank0.options() == b"the options" and os.environ["RANK"] == "1"
    rank0.meet()
    rank0.meet()
    list(rank0)
    """
    followers = follower_of(script)
    try:
        followers.channel.greet(b"the options")
        followers.channel.meet()
        followers.channel.meet()
    finally:
        followers.close()
    assert not runs(followers.pids[0])


def test_a_rank_that_cannot_start_tells_why() -> None:
    followers = follower_of("rank0.report(ValueError('the shard has a hole'))")
    try:
        with pytest.raises(ConfigError, match="rank 1: the shard has a hole"):
            followers.channel.meet()
    finally:
        followers.close(patience_s=0)


def test_options_that_only_a_follower_refuses_are_told(tmp_path: Path) -> None:
    """As when a model's files are gone since rank 0 saw them."""
    place = RankPlace.first(2, "127.0.0.1:1")
    command = [sys.executable, "-m", "minisgl_backend.tensor_parallel"]
    options = {"tensor_parallel_size": 2, "device": "cpu", "model": str(tmp_path)}
    greeting = json.dumps({"options": options, "config": ""})
    followers = Followers(place, command)
    try:
        followers.channel.greet(greeting.encode())
        with pytest.raises(ConfigError, match=r"rank 1: .* holds no config\.json"):
            followers.channel.meet()
    finally:
        followers.close()


def test_one_rank_that_cannot_start_ends_all_and_its_cause_is_kept() -> None:
    """Rank 0 may then be waiting in a collective, which ``on_lost`` ends."""
    script = """\
    if os.environ["RANK"] == "2":
        rank0.report(ValueError("the shard has a hole"))
    else:
        rank0.meet()
    """
    followers = follower_of(script, size=3)
    lost = threading.Event()
    followers.on_lost(lambda failure: lost.set())
    try:
        assert lost.wait(60)
        assert followers.channel.report() == "rank 2: the shard has a hole"
        wait_until(lambda: not runs(followers.pids[0]))
    finally:
        followers.close()


def test_a_rank_that_dies_at_the_start_is_named() -> None:
    followers = follower_of("os.abort()")
    try:
        with pytest.raises(EngineFailure, match="rank 1 is gone"):
            followers.channel.meet()
    finally:
        followers.close(patience_s=0)


def test_a_follower_that_does_not_end_by_itself_is_killed() -> None:
    followers = follower_of("rank0.meet(); import time; time.sleep(600)")
    followers.channel.meet()
    followers.close(patience_s=0.1)
    followers.close()
    assert not runs(followers.pids[0])


def test_a_command_that_cannot_be_run_is_an_error_at_once() -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match=r"^the ranks cannot be started: .*/nonexistent"):
        Followers(RankPlace.first(3, "127.0.0.1:1"), ["/nonexistent"])
    wait_until(lambda: threading.active_count() <= before)


def test_ranks_that_cannot_be_watched_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def at_the_limit(pid: int) -> int:
        started.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", at_the_limit)
    with pytest.raises(ConfigError, match=r"the ranks cannot be started: .*Too many open files"):
        follower_of("import time; time.sleep(600)")
    assert started and not any(map(runs, started))


def test_what_ranks_cannot_do_is_refused_before_any_process_starts() -> None:
    for wrong, message in (
        ({"tensor_parallel_size": 1, "comm": "gloo"}, "comm is for tensor_parallel_size of 2"),
        ({"tensor_parallel_size": 1, "rendezvous": "a:1"}, "rendezvous is for"),
        ({"tensor_parallel_size": 2, "comm": "nccl"}, "comm=nccl does not work on cpu"),
        ({"tensor_parallel_size": 3}, "cannot be split evenly over 3"),
        ({"tensor_parallel_size": 2, "rendezvous": "nowhere"}, "must be HOST:PORT"),
        (
            {"tensor_parallel_size": 2, "rendezvous": "192.0.2.1:5555"},
            r"^rendezvous 192\.0\.2\.1:5555 is not an address of this machine",
        ),
    ):
        options = EngineOptions.from_mapping({"device": "cpu", "num_pages": 8, **wrong})
        with pytest.raises(ConfigError, match=message):
            build_executor(options)
