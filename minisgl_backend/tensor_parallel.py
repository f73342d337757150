"""The start of an engine of several ranks: rank 0's side (``lead``) and the others' (``follow``).

Rank 0 starts a process for each other rank of its host, its follower; on other nodes
``server.node`` does. All sides build their part of the engine at the same time, step by step:

    rank 0, ``lead``                                a follower, ``follow``
    opens the store in which the ranks connect
    starts the followers, waits for other nodes
    sends all of them the options                   reads the options, checks them, opens the store
    ``build_rank``: meets the others, connects, loads its part of the model
    ``LeadingExecutor``: sends plans                ``Follower``: runs plans until rank 0 sends none

A rank that fails reports why on the ``rank_channel``, or its process ends; in either case the start
of all ranks fails. What happens after the start is in ``execution.ranks``.

Run as a program, ``python -m minisgl_backend.tensor_parallel``, this module is a follower. It gets
the process id of its starter and, on rank 0's host, the two descriptors of its end of the channel.
On another node it gets the descriptor of its connection, the descriptor of a pipe into which it
writes once it serves, and the options of this node. The rank's place is in the environment, in
torchrun's variables.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Final, NoReturn

from torch._C._distributed_c10d import Store

from minisgl_backend.build_rank import build_rank
from minisgl_backend.config import EngineOptions
from minisgl_backend.death_signal import end_with
from minisgl_backend.errors import ConfigError, MiniSGLError
from minisgl_backend.execution.adapters import AdapterStore
from minisgl_backend.execution.followers import CANNOT_START, Followers
from minisgl_backend.execution.node_channel import NodeFollowerEnd, OtherNodes
from minisgl_backend.execution.node_handshake import SILENCE_S
from minisgl_backend.execution.rank_channel import FollowerEnd, HostFollowerEnd
from minisgl_backend.execution.ranks import Follower, LeadingExecutor
from minisgl_backend.parallel.connect import connect, open_store
from minisgl_backend.parallel.group import Group
from minisgl_backend.parallel.nodes import read_secret
from minisgl_backend.parallel.place import RankPlace
from minisgl_backend.parts import STANDARD, Parts
from minisgl_backend.resolve import Resolved, resolve
from minisgl_backend.runtime.engine_base import EngineInfo

logger = logging.getLogger(__name__)

_OF_EACH_NODE: Final = (
    "model",
    "model_source",
    "tokenizer",
    "speculative_mtp_model",
    "node_rank",
    "rendezvous",
    "node_secret_file",
)
"""Options that each node sets for itself."""
_OF_RANK_0: Final = ("multi_lora", "lora_modules", "lora_task_ids")
"""Options that other ranks need not know, and that may be long: rank 0 reads adapters and sends
them."""


def lead(facts: Resolved, parts: Parts) -> tuple[EngineInfo, LeadingExecutor, AdapterStore | None]:
    """Start the processes of the other ranks, and build rank 0 together with them. The third result
    is rank 0's main memory for adapters, if requests may name any.

    Raises ``ConfigError`` if a rank cannot start, with its cause.
    """
    options, timeout_s = facts.options, facts.options.distributed_timeout_s
    others = None
    if not facts.place.is_one_host:
        secret = read_secret(options, os.environ)
        others = OtherNodes(facts.place, secret, silence_s=min(SILENCE_S, timeout_s))
    try:
        # the nodes meet at the port of the place; the store has its own
        own_place = facts.place if others is None else replace(facts.place, port=0)
        place, store = open_store(own_place, timeout_s)
        followers = Followers(place, (sys.executable, "-m", parts.follower), others)
    except BaseException:
        if others is not None:
            others.close()
        raise
    channel = followers.channel
    groups: list[Group] = []

    def join() -> Group:
        group = _connect(facts, store)
        groups.append(group)
        followers.on_lost(lambda failure: group.leave())  # else a collective might never return
        return group

    try:
        # the other ranks use the folder that this rank has fetched and the library it has chosen
        told = asdict(replace(options, model=str(facts.folder), comm=facts.comm))
        told |= dict.fromkeys(_OF_RANK_0)
        greeting = {"options": told, "config": _digest(facts)}
        channel.greet(json.dumps(greeting).encode())
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
    logger.info("%d tensor-parallel ranks, processes here %s", place.size, followers.pids)
    return rank.info, leader, rank.adapters


def follow(
    channel: FollowerEnd,
    place: RankPlace,
    parts: Parts = STANDARD,
    *,
    own: EngineOptions | None = None,
    on_ready: Callable[[], object] = lambda: None,
) -> int:
    """Load this rank's part of the model and follow rank 0; the exit code.

    ``own`` are the options that its node was given, if that is not rank 0's node.
    """
    fits = False
    try:
        greeting = json.loads(channel.options())
        options = EngineOptions.from_mapping(greeting["options"])
        if own is not None:
            options = with_own(options, own)
        facts = resolve(options, place)
        if _digest(facts) != greeting["config"]:
            folders = " or ".join(map(str, _folders(facts)))
            raise ConfigError(f"the config.json in {folders} is not that of node 0's model")
        fits = True  # from here on it may be another rank that fails
        # before the ranks meet, since it may take seconds
        _, store = open_store(facts.place, options.distributed_timeout_s)
        rank = build_rank(facts, lambda: _connect(facts, store), channel.meet, parts)
    except Exception as error:
        if not isinstance(error, MiniSGLError):
            logger.exception("this rank cannot start")
        elif own is not None:  # rank 0 is on another machine
            logger.error("this rank cannot start: %s", error)
        channel.report(error)
        return 1 if fits or not isinstance(error, ConfigError) else CANNOT_START
    on_ready()
    try:
        Follower(rank.executor).follow(channel)
    except Exception:
        logger.exception("the ranks are lost")
        return 1
    return 0


def with_own(told: EngineOptions, own: EngineOptions) -> EngineOptions:
    """The options that node 0 has sent, with those that this node sets for itself.

    Raises ``ConfigError`` if this node was given any other option with a value unlike node 0's.
    """
    for spec in fields(own):
        given, theirs = getattr(own, spec.name), getattr(told, spec.name)
        is_compared = spec.name not in (*_OF_EACH_NODE, *_OF_RANK_0)
        if is_compared and given not in (spec.default, theirs):
            shown = "auto" if theirs is None else theirs
            raise ConfigError(
                f"option {spec.name} is {given} on node {own.node_rank}, and {shown} on node 0: "
                "leave it out, or give it on all nodes"
            )
    others = {name: getattr(own, name) for name in _OF_EACH_NODE}
    return replace(told, **others)


def _digest(facts: Resolved) -> str:
    """What machines compare to know that they have the same model, and the same layer for it."""
    digest = hashlib.sha256()
    for folder in _folders(facts):
        digest.update((folder / "config.json").read_bytes())
    return digest.hexdigest()


def _folders(facts: Resolved) -> list[Path]:
    layer_folder = facts.layer_folder
    return [facts.folder] if layer_folder is None else [facts.folder, layer_folder]


def _connect(facts: Resolved, store: Store) -> Group:
    timeout_s = facts.options.distributed_timeout_s
    device = facts.device.torch_device
    return connect(facts.place, store, facts.comm, device, timeout_s=timeout_s)


def main(parts: Parts = STANDARD) -> NoReturn:
    """Be the follower that the process's arguments name, then end the process."""
    connection, second, parent = map(int, sys.argv[1:4])
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the starter, which ends this
    logging.basicConfig(
        level=logging.INFO, format=f"rank {os.environ['RANK']}: %(name)s: %(message)s"
    )
    place = RankPlace.from_environment(os.environ)
    joined = socket.socket(fileno=connection)
    if len(sys.argv) == 4:
        code = follow(HostFollowerEnd(joined, second), place, parts)
    else:
        code = _follow_from_afar(joined, second, place, json.loads(sys.argv[4]), parts)
    logging.shutdown()
    # not by sys.exit: threads of a broken collective could block the interpreter's exit
    os._exit(code)


def _follow_from_afar(
    connection: socket.socket, ready: int, place: RankPlace, given: Mapping[str, str], parts: Parts
) -> int:
    channel = NodeFollowerEnd(connection)

    def lost() -> None:  # this rank may wait in a collective
        logger.error("node 0 is gone, or does not answer")
        logging.shutdown()
        os._exit(1)

    channel.give_signs_of_life(lost)
    return follow(
        channel,
        replace(place, own_address=channel.own_address),
        parts,
        own=EngineOptions.from_mapping(given),
        on_ready=lambda: os.write(ready, b"serves"),
    )


if __name__ == "__main__":
    main()
