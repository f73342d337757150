"""An engine of two replicas, one or the other of which is killed or stopped under load.

Knows the processes of a server's replicas. Each request must end once, either with the answer that
it gets from an intact server or with an error; the server stays ready and is not itself restarted.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from signal import SIGKILL, SIGSTOP
from types import MappingProxyType
from typing import Any, Final

from minisgl_client.client import AsyncClient
from minisgl_client.errors import MinisglError

from minisgl_check.case import Case
from minisgl_check.fault import Fault, Settings, Stage, stage
from minisgl_check.processes import runs
from minisgl_check.waiting import wait_until

_OPTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {"data_parallel_size": "2", "num_pages": "512", "drain_timeout_s": "1"}
)
_NUM_PROMPTS: Final = 40
_AT_ONCE: Final = 16
_NUM_TOKENS: Final = 24
_CODES: Final = frozenset({"INTERNAL", "UNAVAILABLE"})


def two_replicas(settings: Settings) -> AbstractContextManager[Stage]:
    """A server whose engine has two replicas."""
    return stage(settings, _OPTIONS)


def lost(number: int, *, num_strikes: int, num_requests: int) -> Callable[[Stage, Case], None]:
    """The replicas get a signal in turn, each as soon as both are up, while requests run. If the
    settings say another number of requests, the number of signals per request stays the same."""

    def provoke(stage: Stage, case: Case) -> None:
        own, patience_s = stage.own, stage.settings.patience_s
        asked = stage.settings.num_requests or num_requests
        most_strikes = max(1, num_strikes * asked // num_requests)
        server, before = own.server, own.stats().told["num_recoveries"]
        expected = asyncio.run(_answers(stage, _NUM_PROMPTS))
        wrong = [answer for answer in expected if isinstance(answer, MinisglError)]
        case.expect(not wrong, f"requests failed before any fault: {wrong[:1]}")
        struck: list[int] = []
        ended = threading.Event()

        def strike() -> None:
            while len(struck) < most_strikes and not ended.is_set():
                if wait_until(lambda: _all_up(stage) or ended.is_set(), patience_s):
                    replicas = _replicas(stage)
                    # there are none while the engine itself is gone
                    pid = replicas[len(struck) % 2]["pid"] if replicas else None
                    if pid is not None and not ended.is_set():
                        os.kill(pid, number)
                        struck.append(pid)
                        wait_until(lambda: not _all_up(stage), patience_s)

        striker = threading.Thread(target=strike, name="strike")
        striker.start()
        try:
            answers = asyncio.run(_answers(stage, asked))
        finally:
            ended.set()
            striker.join()
        case.expect(struck, "no replica was struck while requests ran")
        _judge(case, answers, expected)
        back = wait_until(lambda: _all_up(stage), patience_s)
        case.expect(back, "not all replicas are back")
        case.expect(not any(map(runs, struck)), "a lost replica is still there")
        case.expect(own.server is server, "all of the server was started again")
        case.expect(own.stats().told["num_recoveries"] == before, "a model was loaded again")
        stage.expect_canary(case)
        told = f"{case.ended['failed']} of {case.count} requests failed, 0 were lost"
        case.what = f"{len(struck)} replicas lost: {told}"

    return provoke


def _judge(
    case: Case, answers: list[str | MinisglError], expected: list[str | MinisglError]
) -> None:
    codes: Counter[str] = Counter()
    for index, answer in enumerate(answers):
        if isinstance(answer, MinisglError):
            codes[answer.code] += 1
        elif answer != expected[index % len(expected)]:
            case.expect(False, f"an answer differs: {answer!r}")
    case.count = len(answers)
    case.ended.update(failed=codes.total(), answered=len(answers) - codes.total())
    case.expect(codes.keys() <= _CODES, f"requests ended so: {codes}")
    case.expect(case.ended["answered"] > case.ended["failed"], "most requests failed")


async def _answers(stage: Stage, number: int) -> list[str | MinisglError]:
    """How ``number`` requests end, ``_AT_ONCE`` at a time: each ends once."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(client: AsyncClient, index: int) -> str | MinisglError:
        prompt = [index % _NUM_PROMPTS + 3, *range(5, 45)]
        async with places:
            try:
                result = await client.generate(
                    input_ids=prompt, max_tokens=_NUM_TOKENS, ignore_eos=True, temperature=0.0
                )
            except MinisglError as error:
                return error
        return f"{result.num_output_tokens} {result.text}"

    async with AsyncClient(stage.own.grpc_address, retries=0) as client:
        asked = asyncio.gather(*(one(client, index) for index in range(number)))
        return await asyncio.wait_for(asked, stage.settings.patience_s * max(1, number / 1000))


def _replicas(stage: Stage) -> list[dict[str, Any]]:
    return list(stage.own.stats().engine.get("replicas", ()))


def _all_up(stage: Stage) -> bool:
    replicas = _replicas(stage)
    return len(replicas) == 2 and all(replica["is_up"] for replica in replicas)


FAULTS: Final = (
    Fault(
        "F28",
        "kill -9 of replicas in turns under load",
        lost(SIGKILL, num_strikes=4, num_requests=1500),
    ),
    Fault(
        "F28",
        "a replica stops for good under load",
        lost(SIGSTOP, num_strikes=1, num_requests=400),
    ),
)
