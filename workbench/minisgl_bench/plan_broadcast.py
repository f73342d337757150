"""`minisgl bench plan-broadcast`: time to send a step's plan to the other ranks.

No model, no device: the followers are processes that receive plans, decode them and do nothing.
Times are wall clock, in microseconds, of steady decode steps with a pause between them, so that
every follower sleeps when its plan comes, as it does while its device works.
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from typing import Final

import click
import numpy as np

from minisgl_backend.cli.options import POSITIVE_INT
from minisgl_backend.death_signal import end_with
from minisgl_backend.execution.followers import Followers
from minisgl_backend.execution.rank_channel import FollowerEnd
from minisgl_backend.parallel.place import Place
from minisgl_backend.plan import StepPlan, decode_plan, encode_plan
from minisgl_bench.planner import decoding_plan
from minisgl_kit.report import Report, json_option

_COMMAND: Final = (sys.executable, "-m", "minisgl_bench.plan_broadcast")
_PAUSE_S: Final = 0.001


def measure(plan: StepPlan, size: int, num_steps: int) -> dict[str, float]:
    """Figures of ``size`` ranks; see ``plan_broadcast``."""
    place = Place.first(size, "127.0.0.1:1")  # never used: no group is made
    followers = Followers(place, _COMMAND)
    channel = followers.channel
    try:
        channel.meet()
        channel.start_steps(timeout_s=60.0)
        sent, taken = [], []
        for _ in range(num_steps):
            time.sleep(_PAUSE_S)
            begin = time.perf_counter()
            channel.send(encode_plan(plan))
            sent.append(time.perf_counter() - begin)
            channel.wait_taken()
            taken.append(time.perf_counter() - begin)
    finally:
        followers.close()
    return {
        "rank_0_us_p50": float(np.percentile(sent, 50)) * 1e6,
        "rank_0_us_p99": float(np.percentile(sent, 99)) * 1e6,
        "taken_us_p50": float(np.percentile(taken, 50)) * 1e6,
        "taken_us_p99": float(np.percentile(taken, 99)) * 1e6,
    }


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
@json_option
def plan_broadcast(num_requests: int, num_steps: int, json_path: Path | None) -> None:
    """Send plans of decode steps to 1, 3 and 7 followers.

    rank_0: its own time to encode and send a plan, which delays a step: at most 200 us. taken:
    until the last follower has it, which overlaps with rank 0's next work.
    """
    plan = decoding_plan(num_requests)
    report = Report("plan broadcast", info={"requests": num_requests})
    for size in (2, 4, 8):
        report.add(ranks=size, **measure(plan, size, num_steps))
    report.emit(json_path)


def _follow(connection: int, memory: int, parent: int) -> None:
    end_with(parent)
    channel = FollowerEnd(socket.socket(fileno=connection), memory)
    channel.meet()
    for words in channel:
        decode_plan(words)


if __name__ == "__main__":
    _follow(*map(int, sys.argv[1:]))
