"""An engine of two ranks, one of which is lost.

Knows the processes of a server's ranks. When a rank is lost, no other rank may outlive it.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from signal import SIGKILL, SIGSTOP
from typing import Final

from minisgl_client.client import AsyncClient
from minisgl_client.errors import MinisglError

from minisgl_backend.errors import EngineFailure
from minisgl_backend.server.process import TritonServer
from minisgl_check.breaks import frail_stage
from minisgl_check.case import Case
from minisgl_check.defect import Defect
from minisgl_check.fault import Fault, Settings, Stage
from minisgl_check.processes import children_of, is_rank, runs
from minisgl_check.waiting import wait_until

_COLLECTIVE_S: Final = 5
NUM_STREAMS: Final = 4
_LONG: Final = 700
_STARTED_S: Final = 60.0


def two_ranks(settings: Settings) -> AbstractContextManager[Stage]:
    """A server whose engine has two ranks, over gloo, which break when they are told to."""
    return frail_stage(
        settings,
        num_pages="256",
        tensor_parallel_size="2",
        distributed_timeout_s=str(_COLLECTIVE_S),
    )


def lost(number: int) -> Callable[[Stage, Case], None]:
    """Rank 1 gets a signal while streams run: each ends with one error, and the engine is back."""

    def provoke(stage: Stage, case: Case) -> None:
        server, rank = stage.own.server, _rank_1(stage)
        ended = struck(stage, case, lambda: os.kill(rank, number))
        case.expect(ended == Counter(INTERNAL=NUM_STREAMS), f"the streams ended so: {ended}")
        _expect_another(stage, case, server, rank)
        case.what = f"{case.ended['failed']} of {case.count} streams failed; a new group serves"

    return provoke


def forward_raises(defect: Defect) -> Callable[[Stage, Case], None]:
    """A forward pass raises on one rank: the other waits for it in the middle of a sum."""

    def provoke(stage: Stage, case: Case) -> None:
        server, rank = stage.own.server, _rank_1(stage)
        with ExitStack() as stack:
            ended = struck(
                stage,
                case,
                lambda: stack.enter_context(stage.own.switch.on(defect)),
            )
        case.expect(ended == Counter(INTERNAL=NUM_STREAMS), f"the streams ended so: {ended}")
        _expect_another(stage, case, server, rank)
        case.what = f"{case.ended['failed']} of {case.count} streams failed; a new group serves"

    return provoke


FAULTS: Final = (
    Fault("F6", "rank 1 of 2 is killed", lost(SIGKILL)),
    Fault("F7", "rank 1 of 2 stops for good", lost(SIGSTOP)),
    Fault("F8", "a forward pass of rank 0 of 2 raises", forward_raises(Defect.ONE_FORWARD)),
    Fault(
        "F8",
        "a forward pass of rank 1 of 2 raises",
        forward_raises(Defect.ONE_FORWARD_OF_RANK_1),
    ),
)


def struck(stage: Stage, case: Case, strike: Callable[[], object]) -> Counter[str]:
    """Strike while streams run, and wait for them; returns the number of each kind of end."""
    own = stage.own
    ended: Counter[str] = Counter()

    async def one(client: AsyncClient, prompt: int) -> None:
        try:
            await client.generate(input_ids=[prompt], max_tokens=_LONG, ignore_eos=True)
            ended["answered"] += 1
        except MinisglError as error:
            ended[error.code] += 1

    def all_run() -> bool:
        return int(own.stats().engine["num_generated_tokens"]) >= before + NUM_STREAMS

    async def go() -> None:
        async with AsyncClient(own.grpc_address, retries=0) as client:
            streams = [asyncio.ensure_future(one(client, n)) for n in range(NUM_STREAMS)]
            begun = await asyncio.to_thread(wait_until, all_run, _STARTED_S)
            case.expect(begun, "the streams did not begin")
            strike()
            await asyncio.wait_for(asyncio.gather(*streams), stage.settings.patience_s)

    before = int(own.stats().engine["num_generated_tokens"])
    asyncio.run(go())
    case.count = ended.total()
    case.ended.update(failed=ended["INTERNAL"], answered=ended["answered"])
    return ended


def _expect_another(stage: Stage, case: Case, server: TritonServer, rank: int) -> None:
    """Expect that a new group serves in the same server, and nothing is left of the old one."""
    patience_s = stage.settings.patience_s
    back = wait_until(lambda: _has_another(stage, rank) and stage.own.serves(), patience_s)
    case.expect(back, "it does not serve again")
    case.expect(stage.own.server is server, "all of the server was started again")
    case.expect(not runs(rank), "the lost rank is still there")
    stage.expect_canary(case)


def _rank_1(stage: Stage) -> int:
    ranks = _ranks_of(stage.own.pid("llm_engine"))
    if len(ranks) != 1:
        raise EngineFailure(f"the engine has {len(ranks)} processes of other ranks")
    return ranks[0]


def _has_another(stage: Stage, rank: int) -> bool:
    engine = stage.own.stats().processes.get("llm_engine")
    return engine is not None and any(pid != rank for pid in _ranks_of(int(engine["pid"])))


def _ranks_of(engine: int) -> list[int]:
    """The processes of an engine's other ranks."""
    return [pid for pid in children_of(engine) if is_rank(pid)]
