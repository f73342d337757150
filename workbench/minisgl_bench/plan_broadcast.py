"""`minisgl bench plan-broadcast`: time to send a step's plan to the other ranks.

No model, no device: the followers are processes that receive plans, decode them and do nothing.
Times are wall-clock microseconds, for steady decode steps with a pause between them, so that every
follower sleeps when its plan comes, as it does while its device works.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

import click
import numpy as np

from minisgl_backend.child_process import import_path
from minisgl_backend.death_signal import end_with
from minisgl_backend.execution.followers import Followers
from minisgl_backend.execution.node_channel import NodeFollowerEnd, OtherNodes
from minisgl_backend.execution.node_handshake import NodePlace, knock
from minisgl_backend.execution.rank_channel import FollowerEnd, HostFollowerEnd
from minisgl_backend.parallel.place import RankPlace
from minisgl_backend.parallel.rendezvous import listen_at
from minisgl_backend.plan import StepPlan, decode_plan, encode_plan
from minisgl_bench.planner import decoding_plan
from minisgl_kit.option_types import POSITIVE_INT
from minisgl_kit.report import Report, json_option

_COMMAND: Final = (sys.executable, "-m", "minisgl_bench.plan_broadcast")
_PAUSE_S: Final = 0.001
_SILENCE_S: Final = 60.0
_SECRET: Final = b"needed by no one on this machine"


def measure(plan: StepPlan, size: int, num_steps: int, *, by_tcp: bool = False) -> dict[str, float]:
    """Figures of ``size`` ranks; see ``plan_broadcast``."""
    with followers_of(size, by_tcp=by_tcp) as followers:
        channel = followers.channel
        channel.meet()
        followers.start_steps(timeout_s=60.0)
        sent, taken = [], []
        for _ in range(num_steps):
            time.sleep(_PAUSE_S)
            begin = time.perf_counter()
            channel.send(encode_plan(plan))
            sent.append(time.perf_counter() - begin)
            if by_tcp:  # there, plans are not acknowledged
                channel.ask()
                channel.wait_answers()
            else:
                channel.wait_taken()
            taken.append(time.perf_counter() - begin)
    return {
        "rank_0_us_p50": float(np.percentile(sent, 50)) * 1e6,
        "rank_0_us_p99": float(np.percentile(sent, 99)) * 1e6,
        "taken_us_p50": float(np.percentile(taken, 50)) * 1e6,
        "taken_us_p99": float(np.percentile(taken, 99)) * 1e6,
    }


def followers_of(size: int, *, by_tcp: bool) -> AbstractContextManager[Followers]:
    """The followers of ``size`` ranks, which end with the block."""
    return _nodes(size) if by_tcp else _one_host(size)


@contextmanager
def _one_host(size: int) -> Iterator[Followers]:
    place = RankPlace.first(size, "127.0.0.1:1")  # never used: no group is made
    followers = Followers(place, _COMMAND)
    try:
        yield followers
    finally:
        followers.close()


@contextmanager
def _nodes(size: int) -> Iterator[Followers]:
    """Each follower as a node of its own, over the loopback interface."""
    with listen_at(RankPlace.first(size, None)) as free:
        port = free.getsockname()[1]
    place = RankPlace.first(size, f"127.0.0.1:{port}", num_nodes=size)
    others = OtherNodes(place, _SECRET, silence_s=_SILENCE_S)
    processes = [
        subprocess.Popen(
            [*_COMMAND, "node", *map(str, (port, size, node))],
            env=import_path(),
            stdin=subprocess.DEVNULL,
        )
        for node in range(1, size)
    ]
    try:
        followers = Followers(place, _COMMAND, others)
        try:
            yield followers
        finally:
            followers.close()
    finally:
        others.close()
        for process in processes:
            process.kill()
            process.wait()


@click.command("plan-broadcast")
@click.option(
    "--requests",
    "num_requests",
    type=POSITIVE_INT,
    default=256,
    show_default=True,
    help="decoding rows",
)
@click.option("--steps", "num_steps", type=POSITIVE_INT, default=2000, show_default=True)
@click.option(
    "--tcp", "by_tcp", is_flag=True, help="as to other nodes, over the loopback interface"
)
@json_option
def plan_broadcast(num_requests: int, num_steps: int, by_tcp: bool, json_path: Path | None) -> None:
    """Time to send plans of decode steps to 1, 3 and 7 followers.

    rank_0: its own time to encode and send a plan, which delays a step: at most 200 us. taken:
    until the last follower has it, which overlaps with rank 0's next work; with --tcp until its
    answer to a question after the plan has come back.
    """
    plan = decoding_plan(num_requests)
    report = Report("plan broadcast", info={"requests": num_requests, "tcp": by_tcp})
    for size in (2, 4, 8):
        report.add(ranks=size, **measure(plan, size, num_steps, by_tcp=by_tcp))
    report.emit(json_path)


def _follow(channel: FollowerEnd) -> None:
    num_done = 0
    channel.meet()
    for words in channel:
        if len(words) == 0:
            channel.answer(num_done)
        else:
            decode_plan(words)
            num_done += 1


def main(arguments: list[str]) -> None:
    """Be a follower: of this host by its descriptors, or the only rank of a node."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the starter, which ends this
    if arguments[0] == "node":
        port, size, node = map(int, arguments[1:])
        connection = socket.create_connection(("127.0.0.1", port))
        knock(connection, _SECRET, NodePlace(size, node, 0))
        channel = NodeFollowerEnd(connection)
        channel.give_signs_of_life(lambda: None)
        _follow(channel)
        return
    descriptor, memory, parent = map(int, arguments)
    end_with(parent)
    _follow(HostFollowerEnd(socket.socket(fileno=descriptor), memory))


if __name__ == "__main__":
    main(sys.argv[1:])
