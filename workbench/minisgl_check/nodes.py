"""An engine of two ranks on two machines, the second of which is lost.

Knows the process of node 1, which is ours, and what is promised if a node is lost: each stream ends
with one error; node 0 loads its engine again, in the same server, and waits for a node 1, the same
or another. Must not know how nodes find out that another one is lost.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from signal import SIGCONT, SIGKILL, SIGTERM
from typing import Final

from minisgl_backend.errors import EngineFailure
from minisgl_check.case import Case
from minisgl_check.fault import Fault, Settings, Stage, stage
from minisgl_check.machines import Machine, OtherNode, can_have_machines, free_port, machine
from minisgl_check.processes import runs
from minisgl_check.ranks import NUM_STREAMS, struck
from minisgl_check.waiting import wait_until

_SECRET: Final = "of the check, and of nothing else"
_UNREADY_S: Final = 10.0
_COLLECTIVE_S: Final = 30
"""Longer than the silence after which a node counts as lost."""


@dataclass(slots=True)
class _Group:
    """A server that is node 0, and node 1. ``options`` are those of node 1's command."""

    stage: Stage
    other: OtherNode
    options: tuple[str, ...]
    machine: Machine | None

    def replace_node(self) -> None:
        """Start another node 1 in place of one that has ended."""
        self.other.close()
        self.other = OtherNode(self.other.rendezvous, *self.options, machine=self.machine)


@contextmanager
def _two_nodes(settings: Settings, machine: Machine | None = None) -> Iterator[_Group]:
    host = "127.0.0.1" if machine is None else machine.address
    rendezvous = f"{host}:{free_port(host)}"
    with tempfile.NamedTemporaryFile("w") as secret:
        secret.write(_SECRET)
        secret.flush()
        options = {
            "num_pages": "256",
            "drain_timeout_s": "1",
            "tensor_parallel_size": "2",
            "distributed_timeout_s": str(_COLLECTIVE_S),
            "nnodes": "2",
            "rendezvous": rendezvous,
            "node_secret_file": secret.name,
        }
        own = (f"--node-secret-file={secret.name}", "--drain-timeout-s=1")
        other = OtherNode(rendezvous, *own, machine=machine)
        found: list[_Group] = []
        try:
            with stage(settings, options) as place:
                found.append(_Group(place, other, own, machine))
                yield found[0]
        finally:
            (found[0].other if found else other).close()


def lost(
    strike: Callable[[_Group], list[int]],
    mend: Callable[[_Group], None],
    *,
    by_cable: bool = False,
) -> Callable[[Settings, Case], None]:
    """Node 1 is struck while streams run: each ends with one error. Once it is mended, a new group
    serves in the same server, and nothing is left of the old one.

    ``strike`` returns the processes that must end. With ``by_cable``, node 1 is on a machine of its
    own; if there can be none, the case is skipped.
    """

    def provoke(settings: Settings, case: Case) -> None:
        if by_cable and not can_have_machines():
            case.is_skipped = True
            case.what = "a cable takes root and iproute2"
            return
        with (
            machine() if by_cable else nullcontext() as other,
            _two_nodes(settings, other) as group,
        ):
            _lose(group, case, strike, mend)

    return provoke


def _lose(
    group: _Group,
    case: Case,
    strike: Callable[[_Group], list[int]],
    mend: Callable[[_Group], None],
) -> None:
    stage, own, patience_s = group.stage, group.stage.own, group.stage.settings.patience_s
    server, engine, gone = own.server, own.pid("llm_engine"), list[int]()
    ended = struck(stage, case, lambda: gone.extend(strike(group)))
    case.expect(ended == Counter(INTERNAL=NUM_STREAMS), f"the streams ended so: {ended}")
    unready = wait_until(lambda: not own.is_ready(), _UNREADY_S)
    case.expect(unready, "it is ready without node 1")
    mend(group)
    back = wait_until(lambda: own.is_ready() and own.serves(), patience_s)
    case.expect(back, f"it does not serve again; node 1 said: {group.other.log[-500:]}")
    case.expect(own.server is server, "all of the server was started again")
    case.expect(own.pid("llm_engine") != engine, "the engine is the old one")
    left = wait_until(lambda: not any(map(runs, gone)), patience_s)
    case.expect(left, "processes of the lost node are left")
    stage.expect_canary(case)
    stage.invariants.renew()
    case.failures += stage.invariants.violations()
    ranks = group.other.ranks()
    group.other.signal(SIGTERM)
    case.expect(group.other.wait() == 0, "node 1 did not end well")
    case.expect(not any(map(runs, ranks)), "ranks of node 1 have outlived it")
    case.what = f"{case.ended['failed']} of {case.count} streams failed; a new group serves"


def _kill(group: _Group) -> list[int]:
    ranks = group.other.ranks()
    group.other.signal(SIGKILL)
    return [*ranks, group.other.pid]


def _freeze(group: _Group) -> list[int]:
    return group.other.freeze()


def _thaw(group: _Group) -> None:
    for pid in (*group.other.ranks(), group.other.pid):
        os.kill(pid, SIGCONT)


def _pull(group: _Group) -> list[int]:
    ranks = group.other.ranks()
    _cable(group).pull()
    return ranks


def _plug(group: _Group) -> None:
    _cable(group).plug()


def _cable(group: _Group) -> Machine:
    if group.machine is None:
        raise EngineFailure("node 1 is no machine of its own")
    return group.machine


FAULTS: Final = (
    Fault("F29", "node 1 of 2 is killed, and another comes", lost(_kill, _Group.replace_node)),
    Fault("F29", "node 1 of 2 stands still, and goes on later", lost(_freeze, _thaw)),
    Fault(
        "F29",
        "the cable to node 1 of 2 is cut, and mended",
        lost(_pull, _plug, by_cable=True),
    ),
)
