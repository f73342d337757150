"""A gateway that is killed, and a client of it that reads nothing.

Knows gateways and sockets. The engine must be done with the requests of either.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from signal import SIGKILL
from typing import Any, Final

from minisgl_check.canary import PROMPTS
from minisgl_check.case import Case
from minisgl_check.fault import Fault, Stage
from minisgl_check.leavers import FREED_WITHIN_MS
from minisgl_check.waiting import wait_until
from minisgl_kit.leaving import EventStreamClose
from minisgl_kit.own_gateway import Gateway, gateway_of

_NUM_STREAMS: Final = 16
_LONG: Final = 900
_PATIENCE_S: Final = 2
"""The gateway's timeout for clients that do not read; the default is 30 s."""
_SETTLES_S: Final = 30.0
_ANSWERS: Final = 2


def killed(stage: Stage, case: Case) -> None:
    """SIGKILL of the gateway with open streams, both running and waiting."""
    own = stage.own
    case.count = _NUM_STREAMS
    with gateway_of(own.grpc_address) as gateway, ExitStack() as stack:
        for number in range(_NUM_STREAMS):
            client = EventStreamClose(gateway.address, "/v1/completions", _body([number]))
            stack.callback(client.leave)
        begun = wait_until(lambda: _num_open(stage) == _NUM_STREAMS, _SETTLES_S)
        case.expect(begun, f"{_num_open(stage)} streams began")
        gateway.process.send_signal(SIGKILL)
        killed_s = time.perf_counter()
        ended = wait_until(lambda: _num_open(stage) == 0, _SETTLES_S)
        freed_ms = 1e3 * (time.perf_counter() - killed_s)
    case.expect(ended, "requests of a gateway that is no more are still there")
    case.ended["cut"] += _NUM_STREAMS
    case.what = f"all freed after {freed_ms:.0f} ms"
    case.figures = {"kill -9 of the gateway: all freed after, ms": freed_ms}
    if stage.settings.is_timed:
        case.expect(freed_ms <= 2 * FREED_WITHIN_MS, f"freed after {freed_ms:.0f} ms")


def silent_reader(stage: Stage, case: Case) -> None:
    """A client asks for much and reads nothing: it is cut off, and others stay as fast."""
    own = stage.own
    before_mb = own.stats().resident_mb
    alone_ms = _slowest_ms(stage)
    with (
        gateway_of(own.grpc_address, "--patience-s", str(_PATIENCE_S)) as gateway,
        socket.socket() as reader,
    ):
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = gateway.address.rsplit(":", 1)
        reader.connect((host, int(port)))
        # answers with many alternatives, so that the sockets' buffers cannot take it all
        body = json.dumps(_body([7], n=_ANSWERS, logprobs=20)).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {gateway.address}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader.sendall(head.encode() + body)
        begun = wait_until(lambda: _num_open(stage) > 0, _SETTLES_S)
        case.expect(begun, "its request did not begin")
        beside_ms = _slowest_ms(stage)
        cut = wait_until(lambda: _num_cut(gateway) == 1, _SETTLES_S)
        case.expect(cut, "it was not cut")
        freed = wait_until(lambda: _num_open(stage) == 0, _SETTLES_S)
        case.expect(freed, "its request goes on")
    case.count = 1
    case.ended["cut"] += 1
    grown_mb = own.stats().resident_mb - before_mb
    case.what = f"cut; a canary's answer took {beside_ms:.0f} ms beside it, {alone_ms:.0f} alone"
    case.figures = {"memory grown with a silent reader at the gateway, MB": grown_mb}
    stage.expect_canary(case)


FAULTS: Final = (
    Fault("F15", f"kill -9 of the gateway with {_NUM_STREAMS} streams", killed, has_figures=True),
    Fault("F14", "a client of the gateway reads nothing", silent_reader),
)


def _body(prompt: list[int], **more: Any) -> dict[str, Any]:
    asked = {"model": "minisgl", "prompt": prompt, "max_tokens": _LONG, "stream": True}
    return {**asked, "ignore_eos": True, **more}


def _num_open(stage: Stage) -> int:
    return int(stage.own.stats().engine.get("num_open", -1))


def _num_cut(gateway: Gateway) -> float:
    return gateway.metric("minisgl_gateway_slow_readers_total")


def _slowest_ms(stage: Stage) -> float:
    """How long the slowest of the canary's prompts takes, each sent once."""

    def timed(ask: Callable[[], None]) -> float:
        begin_s = time.perf_counter()
        ask()
        return 1e3 * (time.perf_counter() - begin_s)

    return max(timed(stage.canary.compare) for _ in PROMPTS)
