"""Stops of `minisgl serve`: with requests open, and while it loads.

Knows signals and processes of this machine. Must not know how the command is started (``served``).
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Final

from minisgl_client.client import AsyncClient
from minisgl_client.errors import MinisglError

from minisgl_check.case import Case
from minisgl_check.fault import Fault, Settings
from minisgl_check.processes import children_of, runs
from minisgl_check.served import Served, served
from minisgl_check.target import Target
from minisgl_check.waiting import wait_until

_DRAIN_S: Final = 5
_NUM_SHORT: Final = 8
_SHORT: Final = 40
_ENDLESS: Final = 8000
STOPPED_WITHIN_S: Final = 10.0
_GONE_WITHIN_S: Final = 60.0


def drained(settings: Settings, case: Case) -> None:
    """SIGTERM with eight short requests and an endless one: the short ones finish."""
    with served("--drain-timeout-s", str(_DRAIN_S), tritonserver=settings.tritonserver) as server:
        target = server.target(settings.patience_s)
        if target is None:
            case.expect(False, "the server was not ready in time")
            return
        pids = [int(one["pid"]) for one in target.stats().processes.values()]
        ended: Counter[str] = Counter()
        asyncio.run(_stop_with_requests(server, target, ended))
        begin_s = time.perf_counter()
        case.expect(ended["whole"] == _NUM_SHORT, f"the requests ended so: {dict(ended)}")
        case.expect(ended["UNAVAILABLE"] == 1, f"the requests ended so: {dict(ended)}")
        _expect_end(case, server, pids, settings.patience_s)
        case.count = ended.total()
        case.ended.update(answered=ended["whole"], failed=ended["UNAVAILABLE"])
        seconds = time.perf_counter() - begin_s
        case.what = (
            f"{ended['whole']} finished, 1 got an error; gone {seconds:.1f} s after the last"
        )
        case.figures = {"drain: from the last answer to the end, s": seconds}


def stopped_while_loading(settings: Settings, case: Case) -> None:
    """SIGTERM as soon as tritonserver runs, before any model is ready."""
    case.count = 1
    with served(tritonserver=settings.tritonserver) as server:
        started = wait_until(lambda: bool(children_of(server.process.pid)), settings.patience_s)
        case.expect(started, "tritonserver was not started")
        pids = children_of(server.process.pid)
        begin_s = time.perf_counter()
        server.process.send_signal(signal.SIGTERM)
        _expect_end(case, server, pids, settings.patience_s)
        seconds = time.perf_counter() - begin_s
        case.what = f"gone after {seconds:.1f} s"
        case.figures = {"SIGTERM while loading: gone after, s": seconds}
        if settings.is_timed:
            case.expect(seconds <= STOPPED_WITHIN_S, f"it took {seconds:.1f} s")


FAULTS: Final = (
    Fault(
        "F17",
        f"SIGTERM with {_NUM_SHORT} short requests and an endless one",
        drained,
        has_figures=True,
    ),
    Fault("F18", "SIGTERM while the models are loaded", stopped_while_loading, has_figures=True),
)


async def _stop_with_requests(server: Served, target: Target, ended: Counter[str]) -> None:
    async def one(client: AsyncClient, number: int, max_tokens: int) -> None:
        try:
            result = await client.generate(
                input_ids=[number], max_tokens=max_tokens, ignore_eos=True
            )
            ended["whole" if result.num_output_tokens == max_tokens else "short"] += 1
        except MinisglError as error:
            ended[error.code] += 1

    async with AsyncClient(target.grpc_address, retries=0) as client:
        lengths = [_SHORT] * _NUM_SHORT + [_ENDLESS]
        requests = [asyncio.ensure_future(one(client, n, it)) for n, it in enumerate(lengths)]

        def all_open() -> bool:
            return int(target.stats().engine["num_seen"]) >= before + len(lengths)

        before = int(target.stats().engine["num_seen"])
        await asyncio.to_thread(wait_until, all_open, _GONE_WITHIN_S)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.gather(*requests)


def _expect_end(case: Case, server: Served, pids: list[int], patience_s: float) -> None:
    """The server must end with code 0, and leave no process, file or shared memory."""
    try:
        code = server.process.wait(patience_s)
    except subprocess.TimeoutExpired:
        case.expect(False, "it does not end")
        return
    case.expect(code == 0, f"it ended with code {code}")
    gone = wait_until(lambda: not any(map(runs, pids)), _GONE_WITHIN_S)
    case.expect(gone, "processes are left")
    left = [path.name for path in server.folder.iterdir()]
    case.expect(not left, f"files are left: {left}")
    regions = list(Path("/dev/shm").glob(f"minisgl-{server.process.pid}-*"))
    case.expect(not regions, f"shared memory is left: {regions}")
