"""Callers with deadlines, with ids of their own and in large numbers, and callers of a full server.

Knows requests and what callers see of them, and, for ``few_descriptors``, tritonserver's
descriptors.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import resource
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from minisgl_client.client import AsyncClient, Client
from minisgl_client.errors import MinisglError
from minisgl_client.request import build
from minisgl_client.stream import Stream

from minisgl_backend.errors import EngineFailure
from minisgl_check.case import Case
from minisgl_check.defect import Defect
from minisgl_check.fault import Fault, Stage
from minisgl_check.rates import REFUSED_WITHIN_MS
from minisgl_check.waiting import wait_until
from minisgl_kit.leaving import GrpcCancel
from minisgl_kit.own_gateway import gateway_of

_LONG: Final = 480
"""The pages of ``OPTIONS`` hold two such answers. If steps can be slow, one takes 10 s, so that it
has not ended when the next thing happens."""
_STARTED_S: Final = 60.0
_NUM_REFUSED: Final = 20
_NUM_CALLS: Final = 200
_SPARE_DESCRIPTORS: Final = 4
_SCARCE_S: Final = 3.0
"""Shorter than the supervisor's patience with a tritonserver that accepts no connections."""
_NUM_CONNECTIONS: Final = 40


def deadline_in_the_queue(stage: Stage, case: Case) -> None:
    """A request that waits until its deadline is refused, and never prefilled."""
    case.count = 1
    prompt = [7] * 99
    with stage.own.switch.on(Defect.SLOW), _rows_taken(stage) as client:
        before = stage.own.stats().engine["num_prompt_tokens"]
        try:
            client.generate(input_ids=prompt, max_tokens=1, timeout_ms=200)
            case.expect(False, "was answered")
        except MinisglError as error:
            case.ended["refused"] += 1
            expected = ("UNAVAILABLE", "TIMEOUT")
            case.expect(error.code in expected, f"ended with {error.code}")
            case.what = str(error)
        computed = stage.own.stats().engine["num_prompt_tokens"] - before
    # a prompt is counted as a whole; the short ones that hold the rows may be counted only now
    case.expect(computed < len(prompt), f"{computed} prompt tokens were computed meanwhile")


def one_id_twice(stage: Stage, case: Case) -> None:
    """Ids are callers' labels: two requests with one stay apart, and a stop of it ends both."""
    own = stage.own
    case.count = 4
    with Client(own.grpc_address, retries=0) as client:
        client.cancel("never heard of")
        with own.switch.on(Defect.SLOW):
            pair = [_endless(client, number, request_id="twin") for number in (1, 2)]
            before = own.stats().engine["num_cancelled"]
            client.cancel("twin")
            client.cancel("twin")
        for stream in pair:
            reason = _finish_of(stream)
            case.ended["cut"] += 1
            case.expect(reason in ("cancelled", "CANCELLED"), f"a stopped one ended with {reason}")
        client.cancel("twin")
        cancelled = own.stats().engine["num_cancelled"] - before
        case.expect(cancelled == 2, f"{cancelled} were cancelled instead of 2")
        apart = [
            client.stream(
                input_ids=[5, number], max_tokens=length, ignore_eos=True, request_id="twin"
            )
            for number, length in ((1, 20), (2, 30))
        ]
        for stream, length in zip(apart, (20, 30), strict=True):
            _finish_of(stream)
            got = stream.result.num_output_tokens
            case.ended["answered"] += 1
            case.expect(got == length, f"one of two with the same id got {got} tokens")
    case.what = "stopped together, answered apart; stops of ids that are no more do nothing"


def full_behind_the_gateway(stage: Stage, case: Case) -> None:
    """The gateway says that the queue is full, and when to retry."""
    own = stage.own
    info = own.stats().info
    room = int(info["max_running_requests"]) + int(info["max_queued_requests"])
    took_ms: list[float] = []
    with gateway_of(own.grpc_address) as gateway, _rows_taken(stage, room):
        connection = http.client.HTTPConnection(gateway.address, timeout=stage.settings.patience_s)
        body = json.dumps({"model": "minisgl", "prompt": "Hello", "max_tokens": 1})
        for _ in range(_NUM_REFUSED):
            begin_s = time.perf_counter()
            connection.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            response.read()
            took_ms.append(1e3 * (time.perf_counter() - begin_s))
            status, after = response.status, response.headers.get("Retry-After")
            case.ended["refused"] += 1
            case.expect(status in (429, 503), f"a status of {status}")
            case.expect(after == "1", f"Retry-After is {after}")
        connection.close()
    case.count = len(took_ms)
    slowest_ms = max(took_ms[1:])  # the first brings the connection to the server
    case.what = f"slowest refusal {slowest_ms:.0f} ms"
    case.figures = {"gateway: slowest refusal of a full server, ms": slowest_ms}
    if stage.settings.is_timed:
        case.expect(slowest_ms <= REFUSED_WITHIN_MS, f"a refusal took {slowest_ms:.0f} ms")


def calls_beyond_every_queue(stage: Stage, case: Case) -> None:
    """Far more calls at once than the ensemble's steps can take in: each must end."""
    ended: Counter[str] = Counter()

    async def one(client: AsyncClient, number: int) -> None:
        try:
            await client.generate(input_ids=[number], max_tokens=4, ignore_eos=True)
            ended["answered"] += 1
        except MinisglError as error:
            ended["refused" if error.code == "UNAVAILABLE" else "failed"] += 1

    async def go() -> None:
        async with (
            AsyncClient(stage.own.grpc_address, retries=0) as grpc,
            AsyncClient(stage.own.http_url, retries=0) as http,
        ):
            calls = [one(http if n % 4 == 3 else grpc, n) for n in range(_NUM_CALLS)]
            await asyncio.wait_for(asyncio.gather(*calls), stage.settings.patience_s)

    asyncio.run(go())
    case.count = ended.total()
    case.ended += ended
    case.expect(case.count == _NUM_CALLS, f"{_NUM_CALLS - case.count} never ended")
    case.expect(not ended["failed"], f"{ended['failed']} failed")
    bounded = [
        path.parent.name
        for path in stage.own.server.repository.glob("*/config.pbtxt")
        if "max_queue_size" in path.read_text("utf-8")
    ]
    case.expect(not bounded, f"Triton's own queue is bounded for {bounded}")
    case.what = f"{ended['answered']} answered, {ended['refused']} refused; no queue of Triton's"


def few_descriptors(stage: Stage, case: Case) -> None:
    """tritonserver can open hardly any more files: it refuses, and recovers."""
    own = stage.own
    pid = own.server.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    held = int(own.stats().processes["tritonserver"]["num_descriptors"])
    ended: Counter[str] = Counter()
    with ExitStack() as stack:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (held + _SPARE_DESCRIPTORS, hard))
        stack.callback(resource.prlimit, pid, resource.RLIMIT_NOFILE, (soft, hard))
        host, port = own.http_url.removeprefix("http://").rsplit(":", 1)
        for _ in range(_NUM_CONNECTIONS):
            connection = socket.create_connection((host, int(port)), timeout=1)
            stack.enter_context(connection)
        until_s = time.monotonic() + _SCARCE_S
        # gRPC keeps its connection, HTTP needs a new one each time
        addresses = itertools.cycle((own.grpc_address, own.http_url))
        while time.monotonic() < until_s:
            with Client(next(addresses), retries=0, timeout_s=0.5) as client:
                try:
                    client.generate(input_ids=[1], max_tokens=1)
                    ended["answered"] += 1
                except MinisglError as error:
                    ended["refused"] += 1
                    case.expect("shm" not in str(error), f"tells of the inside: {error}")
    case.count = ended.total()
    case.ended += ended
    case.expect(own.server.pid == pid, "tritonserver was started again")
    case.expect(wait_until(own.serves, stage.settings.patience_s), "it does not serve again")
    case.what = f"{held} + {_SPARE_DESCRIPTORS} descriptors; {dict(ended)} meanwhile"
    stage.expect_canary(case)


FAULTS: Final = (
    Fault("F21", "a deadline passes in the queue", deadline_in_the_queue),
    Fault("F22", "one id twice, stops of unknown and ended ids", one_id_twice),
    Fault("F23", "a full server behind the gateway", full_behind_the_gateway, has_figures=True),
    Fault("F25", f"{_NUM_CALLS} calls at once through the ensemble", calls_beyond_every_queue),
    Fault("F20", "tritonserver runs out of descriptors", few_descriptors),
)


# --- helpers ---------------------------------------------------------------------------------


@contextmanager
def _rows_taken(stage: Stage, count: int | None = None) -> Iterator[Client]:
    """Keeps a number of requests open until the block ends, by default one for each row."""
    own = stage.own
    num = count or int(own.stats().info["max_running_requests"])
    with Client(own.grpc_address, retries=0) as client, ExitStack() as stack:
        for number in range(num):
            asked = {"max_tokens": _LONG, "ignore_eos": True, "stream": True}
            request = build("minisgl", "", {"input_ids": [9, number], **asked})
            stack.callback(GrpcCancel(own.grpc_address, request.to_grpc(None)).leave)
        if not wait_until(lambda: own.stats().engine["num_open"] >= num, _STARTED_S):
            raise EngineFailure(f"the server does not take {num} requests")
        yield client


def _endless(client: Client, number: int, **more: Any) -> Stream:
    stream = client.stream(input_ids=[4, number], max_tokens=_LONG, ignore_eos=True, **more)
    next(stream)
    return stream


def _finish_of(stream: Stream) -> str:
    try:
        for _ in stream:
            pass
    except MinisglError as error:
        return error.code
    return str(stream.result.finish_reason)
