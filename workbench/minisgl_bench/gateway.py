"""`minisgl bench gateway`: the gateway's overhead over the ensemble, independent of the model.

The server is that of `minisgl bench response-path`: the engine is paced, the rest is real. In front
of it `minisgl gateway` runs as a process of its own. For each number of streams the same requests
go over gRPC to the ensemble and over HTTP, as server-sent events, to the gateway, in turns; figures
are medians over turns. So is the share, which compares runs made one right after the other. Server,
gateway and client share the machine, and on a small one they compete for its cores.

The HTTP client keeps the bytes as they come and parses them when the run is over; every text must
be the expected one.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import click

from minisgl_backend.cli.options import tritonserver_option
from minisgl_backend.errors import EngineFailure
from minisgl_bench.response_path import (
    STOP,
    Exchange,
    run_grpc,
    run_streams,
    step_option,
    streams_option,
    summary,
    tokens_option,
)
from minisgl_bench.servers import started_paced
from minisgl_kit.option_types import POSITIVE_INT
from minisgl_kit.own_gateway import gateway_of
from minisgl_kit.report import Report, json_option

_BEGIN: Final = b"HTTP/1.1 200 "
"""How an answer begins that is a stream."""
_END: Final = b"0\r\n\r\n"
"""The last chunk of a body."""


@click.command()
@streams_option
@step_option
@click.option(
    "--requests", type=POSITIVE_INT, default=3, show_default=True, help="requests a stream, in turn"
)
@tokens_option
@click.option(
    "--turns",
    type=POSITIVE_INT,
    default=3,
    show_default=True,
    help="runs of each kind, alternating",
)
@tritonserver_option
@json_option
def gateway(
    streams: Sequence[int],
    step_ms: float,
    requests: int,
    tokens: int,
    turns: int,
    tritonserver: str | None,
    json_path: Path | None,
) -> None:
    """Streams through the gateway compared with gRPC to the ensemble, with a simulated engine."""
    report = Report(
        "gateway",
        info={"step": f"{step_ms:g} ms", "client, gateway and server": "on the same machine"},
    )
    with (
        started_paced(
            {"overlap": "false"}, step_s=step_ms / 1000, tritonserver=tritonserver
        ) as server,
        gateway_of(f"127.0.0.1:{server.grpc_port}") as own_gateway,
    ):
        grpc_address = f"127.0.0.1:{server.grpc_port}"
        warm_up = {"num_streams": 8, "num_requests": 1, "num_tokens": 64}
        asyncio.run(run_grpc(grpc_address, **warm_up))
        asyncio.run(run_http(own_gateway.address, **warm_up))
        for count in streams:
            load = {"num_streams": count, "num_requests": requests, "num_tokens": tokens}
            direct, through = [], []
            for _ in range(turns):
                direct.append(summary(asyncio.run(run_grpc(grpc_address, **load))))
                through.append(summary(asyncio.run(run_http(own_gateway.address, **load))))
            _add(report, count, direct, through)
    report.emit(json_path)


class HttpExchange(Exchange):
    """An exchange whose responses are pieces of an HTTP body, as they arrived."""

    __slots__ = ()

    @property
    def texts(self) -> list[str]:
        """The new text of each piece; raises ``EngineFailure`` if one is an error."""
        return ["".join(_events(piece)) for piece in self.responses]


def _events(piece: bytes) -> Iterator[str]:
    for line in piece.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                raise EngineFailure(event["error"]["message"])
            yield from (choice["text"] for choice in event["choices"])


class _Answers(asyncio.Protocol):
    """The client's side of one connection: one request after another."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._exchange: HttpExchange | None = None
        self._ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert self._exchange is not None and self._ended is not None
        if self._ended.done():  # the rest of a refusal
            return
        if not self._exchange.responses and not data.startswith(_BEGIN):
            status = data.partition(b"\r\n")[0].decode(errors="replace")
            self._ended.set_exception(EngineFailure(f"the gateway answers {status}"))
            return
        self._exchange.arrived_s.append(time.perf_counter())
        self._exchange.responses.append(data)
        if data.endswith(_END):
            self._ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(EngineFailure("the gateway closed the connection"))

    async def ask(self, prompt: str, num_tokens: int) -> HttpExchange:
        """One request and its whole answer."""
        assert self._transport is not None
        request = _request(prompt, num_tokens)
        self._ended = asyncio.get_running_loop().create_future()
        self._exchange = HttpExchange(num_tokens, time.perf_counter())
        self._transport.write(request)
        await self._ended
        return self._exchange

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()


async def run_http(
    address: str, *, num_streams: int, num_requests: int, num_tokens: int
) -> list[list[Exchange]]:
    """Send the requests to the gateway, on one connection per stream; see ``run_streams``."""
    loop = asyncio.get_running_loop()
    host, port = address.split(":")
    connections: list[_Answers] = []
    idle: list[_Answers] = []

    async def ask(prompt: str, length: int) -> Exchange:
        if not idle:
            _, made = await loop.create_connection(_Answers, host, int(port))
            connections.append(made)
            idle.append(made)
        connection = idle.pop()
        exchange = await connection.ask(prompt, length)
        idle.append(connection)
        return exchange

    try:
        return await run_streams(
            ask, num_streams=num_streams, num_requests=num_requests, num_tokens=num_tokens
        )
    finally:
        for connection in connections:
            connection.close()


def _request(prompt: str, num_tokens: int) -> bytes:
    fields = {
        "model": "minisgl",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "stop": STOP,
        "stream": True,
    }
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _add(
    report: Report,
    count: int,
    direct_runs: list[dict[str, Any]],
    through_runs: list[dict[str, Any]],
) -> None:
    direct, through = _medians(direct_runs), _medians(through_runs)
    shares = [
        100 * after["tokens_per_s"] / before["tokens_per_s"]
        for before, after in zip(direct_runs, through_runs, strict=True)
    ]
    report.add(
        streams=count,
        grpc_tokens_per_s=direct["tokens_per_s"],
        gateway_tokens_per_s=through["tokens_per_s"],
        share_percent=statistics.median(shares),
        grpc_ttft_p50_ms=direct["ttft_p50_ms"],
        gateway_ttft_p50_ms=through["ttft_p50_ms"],
        added_ttft_ms=through["ttft_p50_ms"] - direct["ttft_p50_ms"],
        gateway_ttft_p99_ms=through["ttft_p99_ms"],
        grpc_tokens_per_chunk=direct["tokens_per_chunk"],
        gateway_tokens_per_read=through["tokens_per_chunk"],
    )
