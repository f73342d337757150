"""Leaving an answer frees its place in the engine, and reading it to its end does no harm."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from minisgl_client import AsyncClient, Cancelled, Client, Closed
from minisgl_client.answer import Delta, LoraAdapter, Tokens
from minisgl_client.attempts import Attempts
from minisgl_client.errors import Unavailable
from minisgl_client.request import Request, build
from minisgl_client.stream import Stream
from minisgl_client.transport import Call

from minisgl_backend.server.process import TritonServer
from tests.client.engine import Engine
from tests.client.ways import Way, all_ways, url_of
from tests.server.client import PATIENCE_S, Metrics, wait_for

pytestmark = pytest.mark.server

LONG: dict[str, Any] = {"input_ids": [1, 2, 3], "max_tokens": 16000}
"""320 s of the paced engine's time."""


@all_ways
def test_closing_the_stream(paced_server: TritonServer, way: Way) -> None:
    engine = Engine(paced_server)
    deltas, result = way.stream(paced_server, leave_after=2, **LONG)
    engine.check_cancelled()
    assert result.text == "".join(delta.text for delta in deltas) != ""
    assert result.finish_reason is None
    assert result.num_output_tokens == sum(delta.num_output_tokens or 0 for delta in deltas)


@all_ways
def test_closing_after_the_last_delta(paced_server: TritonServer, way: Way) -> None:
    """The underlying stream ends by itself: nothing is cancelled."""
    engine = Engine(paced_server)
    _, result = way.stream(paced_server, prompt="a", max_tokens=1, leave_after=1)
    assert result.finish_reason == "length"
    assert way.generate(paced_server, prompt="a", max_tokens=1).text
    engine.check_finished(2)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_cancelling_the_task(paced_server: TritonServer, protocol: str) -> None:
    engine = Engine(paced_server)
    started = asyncio.Event()

    async def read() -> None:
        async with client.stream(**LONG) as stream:
            async for _ in stream:
                started.set()

    async with AsyncClient(url_of(paced_server, protocol)) as client:
        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(engine.check_cancelled)
        assert (await client.generate("a", max_tokens=1)).text


def test_letting_go_of_the_stream(paced_server: TritonServer) -> None:
    engine = Engine(paced_server)
    with Client(url_of(paced_server, "grpc")) as client:
        for _ in client.stream(**LONG):
            break
        engine.check_cancelled()


async def test_letting_go_of_an_asynchronous_stream(paced_server: TritonServer) -> None:
    engine = Engine(paced_server)
    async with AsyncClient(url_of(paced_server, "grpc")) as client:
        async for _ in client.stream(**LONG):
            break
        await asyncio.to_thread(engine.check_cancelled)


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_whole_answer_that_nobody_waits_for(
    paced_server: TritonServer, is_async: bool
) -> None:
    """Over gRPC, with the synchronous client or the asynchronous one."""
    engine = Engine(paced_server)
    url = url_of(paced_server, "grpc")

    def is_running() -> bool:
        return Metrics(paced_server)["vllm:num_requests_running"] == 1

    if is_async:
        async with AsyncClient(url) as client:
            task = asyncio.create_task(client.generate(**LONG))
            await asyncio.to_thread(wait_for, is_running, "a running request")
            task.cancel()
            await asyncio.wait([task])
            await asyncio.to_thread(engine.check_cancelled)
    else:
        with Client(url) as threaded:
            asking = asyncio.create_task(asyncio.to_thread(threaded.generate, **LONG))
            await asyncio.to_thread(wait_for, is_running, "a running request")
        with pytest.raises(Cancelled):
            await asking
        await asyncio.to_thread(engine.check_cancelled)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_closing_from_another_thread(paced_server: TritonServer, protocol: str) -> None:
    """Closing the stream ends it; closing the client is an error for whoever waits."""
    engine = Engine(paced_server)
    client = Client(url_of(paced_server, protocol))
    with client.stream(**LONG) as stream:
        next(stream)
        closing = threading.Timer(0.2, stream.close)
        closing.start()
        assert len(list(stream)) < 10_000
        closing.join()
    engine.check_cancelled()
    with client.stream(**LONG) as stream:
        next(stream)
        closing = threading.Timer(0.2, client.close)
        closing.start()
        with pytest.raises(Closed, match="the client was closed"):
            list(stream)
        closing.join()
    engine.check_cancelled(2)
    for ask in (client.generate, client.cancel, lambda text: list(client.stream(text))):
        with pytest.raises(Closed, match="the client was closed"):
            ask("a")
    with pytest.raises(Cancelled):
        client.is_ready()


class Waiting:
    """A transport and its calls: it waits until it may start a call, and may refuse the first."""

    closed = False

    def __init__(self, *, refuses: bool) -> None:
        self._refuses = refuses
        self.num_started = 0
        self.is_cancelled = False
        self.is_asked = threading.Event()
        self.may_start = threading.Event()
        self._deltas = iter([[Delta("more")]] * 10)

    def start(self, request: Request, timeout_ms: int | None) -> Call:
        self.num_started += 1
        if self._refuses:
            raise Unavailable("queue full")
        self.pause()
        return self

    def pause(self, _: float = 0.0) -> None:
        self.is_asked.set()
        assert self.may_start.wait(PATIENCE_S)

    def read(self) -> Sequence[Delta] | None:
        return next(self._deltas, None)

    def cancel(self) -> None:
        self.is_cancelled = True

    def look_up(self, request: Request, timeout_ms: int | None) -> Tokens:
        raise AssertionError("a stream looks nothing up")

    def order(self, request: Request, timeout_ms: int | None) -> tuple[LoraAdapter, ...]:
        raise AssertionError("a stream orders nothing")

    def is_ready(self, model: str) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("refuses", [True, False])
def test_closing_a_stream_that_has_no_call_yet(
    refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is pausing before it tries again, or its request is being sent."""
    transport = Waiting(refuses=refuses)
    clock = SimpleNamespace(perf_counter=time.perf_counter, sleep=transport.pause)
    monkeypatch.setattr("minisgl_client.stream.time", clock)
    request = build("minisgl", "", {"text_input": "Hi"})
    closed = Stream(transport, request, Attempts("", retries=5, timeout_s=None))
    with ThreadPoolExecutor(1) as pool:
        deltas = pool.submit(list, closed)
        assert transport.is_asked.wait(PATIENCE_S)
        closed.close()
        transport.may_start.set()
        assert deltas.result(PATIENCE_S) == []
    assert transport.num_started == 1
    assert transport.is_cancelled is not refuses


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_closing_an_asynchronous_client(paced_server: TritonServer, protocol: str) -> None:
    """Waiting callers get an error; only a task that is itself cancelled counts as cancelled."""

    async def read(**values: Any) -> None:
        async with client.stream(**values) as stream:
            async for _ in stream:
                pass

    engine = Engine(paced_server)
    client = AsyncClient(url_of(paced_server, protocol))
    ask = client.generate if protocol == "grpc" else read
    waiting, cancelled = (asyncio.ensure_future(ask(**LONG)) for _ in range(2))

    def are_running() -> bool:
        return Metrics(paced_server)["vllm:num_requests_running"] == 2

    await asyncio.to_thread(wait_for, are_running, "two running requests")
    cancelled.cancel()
    await client.aclose()
    with pytest.raises(Closed, match="the client was closed"):
        await waiting
    with pytest.raises(asyncio.CancelledError if sys.version_info >= (3, 11) else Cancelled):
        await cancelled
    with pytest.raises(Closed, match="the client was closed"):
        await client.generate("a")
    with pytest.raises(Cancelled):
        await client.is_ready()
    await asyncio.to_thread(engine.check_cancelled, 2)


@all_ways
def test_cancelling_by_id(paced_server: TritonServer, way: Way) -> None:
    """From another connection; the answer ends with what it has so far."""
    engine = Engine(paced_server)
    url = url_of(paced_server, way.protocol)

    async def cancel() -> None:
        async with AsyncClient(url) as client:
            await client.cancel("job")

    with Client(url) as client, client.stream(request_id="job", **LONG) as stream:
        next(stream)
        if way.is_async:
            asyncio.run(cancel())
        else:
            client.cancel("job")
        for _ in stream:
            pass
        assert stream.result.finish_reason == "cancelled"
    engine.check_cancelled()
