"""The start of an engine of several ranks: rank 0's side (``lead``) and the others' (``follow``).

Rank 0 starts a process for each other rank, its follower, and both sides build their part of the
engine at the same time, step by step:

    rank 0, ``lead``                                a follower, ``follow``
    opens the store in which the ranks connect
    starts the followers, sends them the options    reads the options, checks them, opens the store
    ``build_rank``: meets the others, connects, loads its part of the model
    ``LeadingExecutor``: sends plans                ``Follower``: runs plans until rank 0 sends none

A rank that fails on the way says why on the ``rank_channel``, or its process ends; either ends the
start of all. What happens after the start is in ``execution.ranks``.

As a program, ``python -m minisgl_backend.tensor_parallel``, this module is a follower. Rank 0 gives
it three numbers: the two descriptors of its end of the channel, and its own process id. The rank's
place is in the environment, in torchrun's variables.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
from dataclasses import asdict, replace
from typing import NoReturn

from torch._C._distributed_c10d import Store

from minisgl_backend.build_rank import build_rank
from minisgl_backend.config import EngineOptions
from minisgl_backend.death_signal import end_with
from minisgl_backend.errors import ConfigError, MiniSGLError
from minisgl_backend.execution.adapters import AdapterStore
from minisgl_backend.execution.followers import Followers
from minisgl_backend.execution.rank_channel import FollowerEnd
from minisgl_backend.execution.ranks import Follower, LeadingExecutor
from minisgl_backend.parallel.connect import connect, open_store
from minisgl_backend.parallel.group import Group
from minisgl_backend.parallel.place import Place
from minisgl_backend.parts import STANDARD, Parts
from minisgl_backend.resolve import Resolved, resolve
from minisgl_backend.runtime.engine import EngineInfo

logger = logging.getLogger(__name__)


def lead(facts: Resolved, parts: Parts) -> tuple[EngineInfo, LeadingExecutor, AdapterStore | None]:
    """Start the processes of the other ranks, and build rank 0 together with them. The third result
    is rank 0's main memory for adapters, if requests may name any.

    Raises ``ConfigError`` if a rank cannot start, with its cause.
    """
    options, timeout_s = facts.options, facts.options.distributed_timeout_s
    place, store = open_store(facts.place, timeout_s)
    followers = Followers(place, (sys.executable, "-m", parts.follower))
    channel = followers.channel
    groups: list[Group] = []

    def join() -> Group:
        group = _connect(facts, store)
        groups.append(group)
        followers.on_lost(lambda failure: group.leave())  # else a collective might never return
        return group

    try:
        # the other ranks take the folder that this rank has fetched, and the library it has chosen
        told = replace(options, model=str(facts.folder), comm=facts.comm)
        channel.greet(json.dumps(asdict(told)).encode())
        rank = build_rank(facts, join, channel.meet, parts)
        leader = LeadingExecutor(
            rank.executor,
            rank.group,
            followers,
            timeout_s=timeout_s,
            # gloo ends collectives that wait for too long, NCCL does not
            steps_may_hang=facts.comm != "gloo",
        )
    except BaseException as error:
        report = channel.report()
        followers.close(patience_s=0)
        for group in groups:
            group.leave()
        if report is not None and not isinstance(error, ConfigError):
            raise ConfigError(report) from error
        raise
    logger.info("%d tensor-parallel ranks, processes %s", place.size, followers.pids)
    return rank.info, leader, rank.adapters


def follow(channel: FollowerEnd, parts: Parts = STANDARD) -> int:
    """Load this rank's part of the model and follow rank 0; the exit code."""
    try:
        options = EngineOptions.from_mapping(json.loads(channel.options()))
        facts = resolve(options, Place.from_environment(os.environ))
        # before the ranks meet, since it may take seconds
        _, store = open_store(facts.place, options.distributed_timeout_s)
        rank = build_rank(facts, lambda: _connect(facts, store), channel.meet, parts)
    except Exception as error:
        if not isinstance(error, MiniSGLError):
            logger.exception("this rank cannot start")
        channel.report(error)
        return 1
    try:
        Follower(rank.executor).follow(channel)
    except Exception:
        logger.exception("the ranks are lost")
        return 1
    return 0


def _connect(facts: Resolved, store: Store) -> Group:
    timeout_s = facts.options.distributed_timeout_s
    device = facts.device.torch_device
    return connect(facts.place, store, facts.comm, device, timeout_s=timeout_s)


def main(parts: Parts = STANDARD) -> NoReturn:
    """Be the follower that the process's arguments name, then end the process."""
    connection, memory, parent = map(int, sys.argv[1:])
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for rank 0, which ends this process
    logging.basicConfig(
        level=logging.INFO, format=f"rank {os.environ['RANK']}: %(name)s: %(message)s"
    )
    code = follow(FollowerEnd(socket.socket(fileno=connection), memory), parts)
    logging.shutdown()
    # not by sys.exit: threads of a broken collective could block the interpreter's end
    os._exit(code)


if __name__ == "__main__":
    main()
