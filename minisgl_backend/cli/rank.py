"""The process of a tensor-parallel rank: ``python -m minisgl_backend.cli.rank``.

Rank 0 starts it with three numbers: the descriptors of a socket and of shared memory, and its own
process id. The rank's place is in the environment, in torchrun's variables; its options come
through the socket.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
from typing import NoReturn

from minisgl_backend.build import build_follower
from minisgl_backend.config import EngineOptions
from minisgl_backend.death_signal import end_with
from minisgl_backend.errors import MiniSGLError
from minisgl_backend.execution.followers import Leader
from minisgl_backend.execution.plan_channel import PlanReceiver
from minisgl_backend.execution.ranks import Follower
from minisgl_backend.parallel.place import Place
from minisgl_backend.parts import STANDARD, Parts

logger = logging.getLogger(__name__)


def main(arguments: list[str], parts: Parts = STANDARD) -> int:
    """Load this rank's part of the model and follow rank 0; the exit code."""
    connection, memory, parent = map(int, arguments)
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for rank 0, which ends this process
    rank = os.environ["RANK"]
    logging.basicConfig(level=logging.INFO, format=f"rank {rank}: %(name)s: %(message)s")
    leader = Leader(socket.socket(fileno=connection))
    try:
        options = EngineOptions.from_mapping(json.loads(leader.greeting))
        place = Place.from_environment(os.environ)
        executor = build_follower(options, place, leader.meet, parts).executor
    except Exception as error:
        if not isinstance(error, MiniSGLError):
            logger.exception("this rank cannot start")
        leader.report(error)
        return 1
    try:
        Follower(executor).follow(PlanReceiver(leader.connection, memory))
    except Exception:
        logger.exception("the ranks are lost")
        return 1
    return 0


def run(parts: Parts = STANDARD) -> NoReturn:
    """Run as the rank that the process's arguments name, then end the process."""
    code = main(sys.argv[1:], parts)
    logging.shutdown()
    # not by sys.exit: threads of a broken collective could block the interpreter's end
    os._exit(code)


if __name__ == "__main__":
    run()
