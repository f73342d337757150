"""Ranks on two machines: the tokens are those of one rank, and lost machines end every request.

The second machine is a network namespace if this user may make one, else just another process.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.build import build_executor
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution.followers import Followers
from minisgl_backend.execution.node_channel import OtherNodes
from minisgl_backend.execution.node_handshake import NodePlace, NotYet, Welcome, knock, prepare
from minisgl_backend.parallel.place import RankPlace
from minisgl_backend.request import SamplingParams
from minisgl_check.machines import Machine, OtherNode, can_have_machines, free_port, machine
from minisgl_check.processes import runs
from tests.conformance.checkpoints import write_checkpoint
from tests.parallel.engines import Ranked, ranked_engine, wait_for_all
from tests.parallel.test_lost_ranks import PROMPT, check_all_failed, start_four
from tests.parallel.test_tokens_equal import OPTIONS as SERVING
from tests.parallel.test_tokens_equal import check_equal, serve
from tests.waiting import wait_until

SECRET = "a secret of these tests"
TIMEOUT_S = 4
OPTIONS: dict[str, Any] = {"num_pages": 2000, "distributed_timeout_s": TIMEOUT_S}
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


def wait_until_gone(pids: Sequence[int]) -> None:
    wait_until(lambda: not any(map(runs, pids)))


@contextmanager
def node(*arguments: str, host: str = "127.0.0.1", **given: Any) -> Iterator[OtherNode]:
    """Node 1 of two, which meets node 0 at ``host``; in the end its ranks must be gone."""
    address = f"{host}:{free_port(host)}"
    other = OtherNode(address, "--device=cpu", *arguments, **given)
    try:
        yield other
        last = other.ranks()
    finally:
        other.close()
    wait_until_gone(last)


@contextmanager
def group(other: OtherNode, size: int = 2, **options: Any) -> Iterator[Ranked]:
    """An engine in this process as node 0."""
    given = {"nnodes": 2, "rendezvous": other.rendezvous, **OPTIONS, **options}
    with ranked_engine(size, given.pop("model", None), **given) as ranked:
        yield ranked


@pytest.fixture(scope="module")
def steady() -> Iterator[OtherNode]:
    """A node 1 that several tests use in turn, so it must outlive what they do."""
    with node() as other:
        yield other


def check_serves(other: OtherNode) -> None:
    """A new group answers, with this node or another one that comes to its rendezvous."""
    with group(other) as ranked:
        answer = ranked.submit(PROMPT, SHORT)
        wait_for_all([answer])
        assert answer.error is None


@pytest.fixture
def cable() -> Iterator[Machine]:
    if not can_have_machines():
        pytest.skip("network namespaces take root and iproute2")
    with machine() as other:
        yield other


# --- tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_tokens_are_those_of_one_rank(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With four ranks, each node has one that does not lead. Each node has its own checkpoint, and
    node 1 takes the options that it is not given from node 0."""
    for name in ("one", "other"):
        write_checkpoint("qwen3", tmp_path / name)
    with ranked_engine(1, tmp_path / "one", **SERVING) as ranked:
        expected = serve(ranked)
    monkeypatch.setenv("MINISGL_NODE_SECRET", SECRET)
    with node(f"--model={tmp_path / 'other'}", host="127.0.0.2") as other:
        with group(other, size, model=tmp_path / "one", **SERVING) as ranked:
            wait_until(other.serves)
            assert other.health() == (
                200,
                {"live": True, "ready": True, "phase": "serving", "reasons": []},
            )
            assert len(other.ranks()) == size // 2
            check_equal(serve(ranked), expected)
        wait_until(lambda: not other.serves())
        assert other.health()[0] == 503
        assert other.health("/live")[0] == 200


def test_tokens_of_two_machines(cable: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    with ranked_engine(1, num_pages=OPTIONS["num_pages"]) as ranked:
        expected = serve_short(ranked)
    monkeypatch.setenv("MINISGL_NODE_SECRET", SECRET)
    with node(host=cable.address, machine=cable) as other, group(other) as ranked:
        assert serve_short(ranked) == expected


def serve_short(ranked: Ranked) -> list[list[int]]:
    answers = [
        ranked.submit(PROMPT + index, SamplingParams(max_tokens=16, temperature=1.0, seed=index))
        for index in range(4)
    ]
    wait_for_all(answers)
    return [answer.tokens for answer in answers]


# --- lost nodes ------------------------------------------------------------------------------


def kill_rank(other: OtherNode) -> list[int]:
    (rank,) = other.ranks()
    os.kill(rank, signal.SIGKILL)
    return [rank]


def stop_rank(other: OtherNode) -> list[int]:
    (rank,) = other.ranks()
    os.kill(rank, signal.SIGSTOP)
    return [rank]


@pytest.mark.parametrize("strike", [kill_rank, stop_rank], ids=["killed", "stopped"])
@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
def test_a_lost_rank_of_another_node(
    steady: OtherNode, strike: Callable[[OtherNode], list[int]], *, is_busy: bool
) -> None:
    """Requests fail, and the same node joins the next group, which is the next test's."""
    with group(steady, distributed_timeout_s=60 if strike is kill_rank else 4) as ranked:
        answers = start_four(ranked) if is_busy else []
        lost = strike(steady)
        check_all_failed(ranked, answers)
    wait_until_gone(lost)


def test_a_killed_node_takes_its_ranks_along() -> None:
    with node() as other, group(other) as ranked:
        answers, ranks = start_four(ranked), other.ranks()
        other.signal(signal.SIGKILL)
        check_all_failed(ranked, answers)
        wait_until_gone(ranks)


def test_a_node_that_is_frozen_and_continues(steady: OtherNode) -> None:
    with group(steady) as ranked:
        answers = start_four(ranked)
        ranks = steady.freeze()
        check_all_failed(ranked, answers)
    for pid in (*ranks, steady.pid):
        os.kill(pid, signal.SIGCONT)
    wait_until_gone(ranks)
    check_serves(steady)


def test_a_cut_cable_ends_both_sides_and_a_mended_one_joins_them(
    cable: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No packet reports it. The timeout of collectives is much longer than that for silence."""
    monkeypatch.setenv("MINISGL_NODE_SECRET", SECRET)
    with node(host=cable.address, machine=cable) as other:
        for is_busy in (True, False):
            with group(other, distributed_timeout_s=600) as ranked:
                answers, ranks = start_four(ranked) if is_busy else [], other.ranks()
                cable.pull()
                check_all_failed(ranked, answers)
                wait_until_gone(ranks)
            cable.plug()
        check_serves(other)


# --- ends ------------------------------------------------------------------------------------


def test_a_node_that_waits_ends_at_once() -> None:
    with node() as other:
        wait_until(lambda: "waiting for node 0" in other.log)
        assert other.health()[0] == 503
        other.signal(signal.SIGTERM)
        assert other.wait() == 0


def test_a_node_that_is_told_to_stop_serves_until_node_0_lets_it_go() -> None:
    """As in a rolling restart: both are told at once, and node 0 drains."""
    with node() as other:
        with group(other) as ranked:
            long = ranked.submit(PROMPT, SamplingParams(max_tokens=150, ignore_eos=True))
            assert long.started.wait(60)
            other.signal(signal.SIGTERM)
            wait_for_all([long])
            assert long.error is None and len(long.tokens) == 150
        assert other.wait() == 0


def test_a_second_signal_ends_a_node_at_once() -> None:
    with node() as other, group(other) as ranked:
        answers = start_four(ranked)
        other.signal(signal.SIGINT)
        wait_until(lambda: "stopping" in other.log)
        other.signal(signal.SIGINT)
        assert other.wait() == 0
        check_all_failed(ranked, answers)


# --- what is refused -------------------------------------------------------------------------


def test_a_node_with_another_secret_is_refused_and_the_group_is_not_affected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with node(secret=SECRET) as good:
        os.kill(good.pid, signal.SIGSTOP)  # the other one comes first
        wrong = OtherNode(good.rendezvous, "--device=cpu", secret="another secret, not that")
        monkeypatch.setenv("MINISGL_NODE_SECRET", SECRET)
        with ThreadPoolExecutor(1) as pool:
            serving = pool.submit(check_serves, good)
            try:
                assert wrong.wait() == 2
                assert "node 0 has another secret" in wrong.log
            finally:
                wrong.close()
                os.kill(good.pid, signal.SIGCONT)
            serving.result()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page-size=32"], "option page_size is 32 on node 1, and 16 on node 0"),
        (["--model=MODEL"], "is not that of node 0's model"),
    ],
)
def test_a_node_that_does_not_fit_says_why(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    write_checkpoint("llama", tmp_path)
    given = [argument.replace("MODEL", str(tmp_path)) for argument in arguments]
    with node(*given) as other, ThreadPoolExecutor(1) as pool:
        starting = pool.submit(check_serves, other)
        assert other.wait() == 2
        assert message in other.log
        with pytest.raises(ConfigError, match=f"rank 1: .*{message}"):
            starting.result()


def test_rank_0_waits_on_after_a_node_that_has_no_place() -> None:
    with node("--nnodes=3") as wrong, ThreadPoolExecutor(1) as pool:
        starting = pool.submit(check_serves, wrong)
        assert wrong.wait() == 2
        assert "node 0 has no place for node 1 of 3" in wrong.log
        right = OtherNode(wrong.rendezvous, "--device=cpu")
        try:
            starting.result()
        finally:
            right.close()


def test_nodes_need_a_secret_where_others_reach_them(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("too short\n")
    reachable: dict[str, Any] = {"nnodes": 2, "rendezvous": "192.0.2.1:29500"}
    for wrong, message in (
        (reachable, "other machines can reach rendezvous 192.0.2.1:29500, so the nodes need a sec"),
        ({**reachable, "node_secret_file": str(short)}, "must have at least 16 bytes, it has 9"),
        ({**reachable, "node_secret_file": "/nowhere"}, "node_secret_file /nowhere: No such file"),
    ):
        options = EngineOptions(tensor_parallel_size=2, device="cpu", num_pages=8, **wrong)
        with pytest.raises(ConfigError, match=message):
            build_executor(options)
        for number in (0, 1):
            files = [f"--node-secret-file={wrong.get('node_secret_file', '')}"]
            other = OtherNode(
                reachable["rendezvous"],
                f"--node-rank={number}",
                "--tensor-parallel-size=2",
                "--device=cpu",
                *(files if "node_secret_file" in wrong else []),
            )
            try:
                assert other.wait() == 2
                assert message in other.log
            finally:
                other.close()


# --- the handshake ---------------------------------------------------------------------------


@contextmanager
def gathering(size: int = 2) -> Iterator[tuple[OtherNodes, RankPlace, list[str]]]:
    """Rank 0 waiting for node 1, without another process; and a list for the causes of losses."""
    place = RankPlace.first(size, f"127.0.0.1:{free_port('127.0.0.1')}", num_nodes=2)
    nodes = OtherNodes(place, SECRET.encode(), silence_s=1.0)
    try:
        yield nodes, place, []
    finally:
        nodes.close()


def connected(place: RankPlace) -> socket.socket:
    return socket.create_connection((place.host, place.port), timeout=30)


def test_garbage_silence_and_length_change_nothing() -> None:
    with gathering() as (nodes, place, causes), ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(nodes.gather, 1234, 60, causes.append)
        callers = [connected(place) for _ in range(24)]
        for index, caller in enumerate(callers):
            if index % 4 == 0:
                caller.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
            elif index % 4 == 1:
                caller.sendall(bytes(2**20))
            elif index % 4 == 2:
                caller.close()
        with connected(place) as good:
            assert knock(good, SECRET.encode(), NodePlace(2, 1, 0)) == Welcome(2, 1, 1234)
            (peer,) = gathered.result(60)
            assert not causes
            good.sendall((2**16 + 1).to_bytes(4, "little"))
            wait_until(lambda: causes == ["rank 1, on node 1, is gone"])
            assert peer.is_lost
        for caller in callers:
            caller.close()
        with pytest.raises(ConnectionRefusedError):
            connected(place)


def test_a_proof_cannot_be_sent_back_or_again() -> None:
    """What rank 0 sent is no proof from a follower, and an old proof none for a new challenge."""
    with gathering() as (nodes, place, causes), ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(nodes.gather, 1234, 60, causes.append)
        with connected(place) as caller:
            challenge = caller.recv(40, socket.MSG_WAITALL)
            caller.sendall(challenge + bytes(12) + challenge[8:])
            assert caller.recv(1) == b"\x01"
        listener = socket.create_server(("127.0.0.1", 0))
        with listener, ThreadPoolExecutor(1) as other:
            between = RankPlace.first(2, f"127.0.0.1:{listener.getsockname()[1]}", num_nodes=2)
            secret = SECRET.encode()

            def knock_between() -> None:
                with connected(between) as caller:
                    knock(caller, secret, NodePlace(2, 1, 0))

            knocking = other.submit(knock_between)
            taken, _ = listener.accept()
            with taken, connected(place) as first:
                taken.sendall(first.recv(40, socket.MSG_WAITALL))
                hello = taken.recv(84, socket.MSG_WAITALL)
            with connected(place) as again:
                again.recv(40, socket.MSG_WAITALL)
                again.sendall(hello)
                assert again.recv(1) == b"\x01"
            with pytest.raises(OSError):
                knocking.result(30)
        with connected(place) as good:
            knock(good, secret, NodePlace(2, 1, 0))
            assert len(gathered.result(60)) == 1


@pytest.mark.parametrize(
    ("verdict", "message"), [(0, "does not know the secret"), (9, "not node 0 of this release")]
)
def test_what_does_not_know_the_secret_is_not_followed(verdict: int, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def impostor() -> None:
            caller, _ = listener.accept()
            with caller:
                caller.sendall(b"minisgl1" + bytes(32))
                caller.recv(84, socket.MSG_WAITALL)
                caller.sendall(bytes([verdict]) + bytes(12 + 32))

        pool.submit(impostor)
        place = RankPlace.first(2, f"127.0.0.1:{listener.getsockname()[1]}", num_nodes=2)
        with connected(place) as caller, pytest.raises(ConfigError, match=message):
            knock(caller, SECRET.encode(), NodePlace(2, 1, 0))


def test_a_caller_that_sends_a_byte_now_and_then_is_sent_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each byte comes soon after the one before, but together they take too long."""
    monkeypatch.setattr("minisgl_backend.execution.node_handshake.HANDSHAKE_S", 1.0)
    with gathering() as (nodes, place, causes), ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(nodes.gather, 1234, 60, causes.append)
        with connected(place) as caller:
            caller.recv(40, socket.MSG_WAITALL)
            caller.settimeout(0.1)

            def is_sent_away() -> bool:
                try:
                    caller.sendall(b"m")
                    return not caller.recv(1)
                except TimeoutError:
                    return False
                except OSError:
                    return True

            wait_until(is_sent_away)
        monkeypatch.undo()
        with connected(place) as good:
            knock(good, SECRET.encode(), NodePlace(2, 1, 0))
            assert len(gathered.result(60)) == 1
            assert not causes


def test_a_rank_comes_once_and_again_when_it_was_lost() -> None:
    with gathering(4) as (nodes, place, causes), ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(nodes.gather, 1234, 60, causes.append)
        secret = SECRET.encode()
        taken = "node 0 has a node 1 already"
        with connected(place) as first:
            assert knock(first, secret, NodePlace(2, 1, 0)) == Welcome(4, 2, 1234)
            with connected(place) as twice, pytest.raises(NotYet, match=taken):
                knock(twice, secret, NodePlace(2, 1, 0))
            for wrong in (NodePlace(3, 1, 0), NodePlace(2, 2, 0), NodePlace(2, 0, 0)):
                with connected(place) as caller, pytest.raises(ConfigError, match="no place for"):
                    knock(caller, secret, wrong)

        def comes_again() -> bool:
            caller = connected(place)
            try:
                knock(caller, secret, NodePlace(2, 1, 0))
            except NotYet:
                caller.close()
                return False
            others.append(caller)
            return True

        others: list[socket.socket] = []
        wait_until(comes_again)
        others.append(connected(place))
        knock(others[1], secret, NodePlace(2, 1, 1))
        assert [peer.rank for peer in gathered.result(60)] == [2, 3]
        assert not causes
        nodes.start_steps()
        wait_until(lambda: "rank 2, on node 1, is silent for 1 s" in causes)
        for caller in others:
            caller.close()


def test_a_place_is_taken_as_soon_as_its_rank_is_welcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though rank 0 has only told it so."""
    may_enter = threading.Event()

    def prepare_late(connection: socket.socket) -> None:
        assert may_enter.wait(60)
        prepare(connection)

    monkeypatch.setattr("minisgl_backend.execution.node_channel.prepare", prepare_late)
    with gathering() as (nodes, place, causes), ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(nodes.gather, 1234, 60, causes.append)
        with connected(place) as first:
            knock(first, SECRET.encode(), NodePlace(2, 1, 0))
            with connected(place) as twice, pytest.raises(NotYet):
                knock(twice, SECRET.encode(), NodePlace(2, 1, 0))
            may_enter.set()
            assert len(gathered.result(60)) == 1
            assert not causes


def test_nodes_that_do_not_come_are_named() -> None:
    with gathering() as (nodes, place, causes):
        where = f"{place.host}:{place.port}"
        with pytest.raises(ConfigError, match=f"node 1 did not come to {where} in 0.1 s"):
            nodes.gather(1234, 0.1, causes.append)


def test_a_start_that_fails_leaves_no_listener() -> None:
    place = RankPlace.first(4, f"127.0.0.1:{free_port('127.0.0.1')}", num_nodes=2)
    nodes = OtherNodes(place, SECRET.encode(), silence_s=1.0)
    with pytest.raises(ConfigError, match="the ranks cannot be started"):
        Followers(place, ["/nonexistent"], nodes)
    with pytest.raises(ConnectionRefusedError):
        connected(place)
