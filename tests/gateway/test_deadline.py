"""A request has one deadline, which includes the time to receive its body."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from minisgl_client.answer import Result
from minisgl_client.client import AsyncClient
from minisgl_client.errors import Timeout
from minisgl_gateway.app import create_app
from minisgl_gateway.gateway_options import GatewayOptions
from minisgl_gateway.telemetry import Telemetry

BODY = json.dumps({"model": "minisgl", "prompt": "Go on."}).encode()


def post(body: AsyncIterator[bytes], options: GatewayOptions) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(options, Telemetry()))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            headers = {"Content-Type": "application/json"}
            asking = client.post("/v1/completions", content=body, headers=headers)
            return await asyncio.wait_for(asking, 20)

    return asyncio.run(ask())


async def pieces(body: bytes, pause_s: float) -> AsyncIterator[bytes]:
    for byte in body:
        yield bytes([byte])
        await asyncio.sleep(pause_s)


@pytest.mark.parametrize(
    ("pause_s", "options"),
    [
        (0.02, GatewayOptions(timeout_s=0.2, patience_s=10)),
        (15, GatewayOptions(timeout_s=300, patience_s=0.1)),
    ],
)
def test_bodies_that_come_too_slowly(pause_s: float, options: GatewayOptions) -> None:
    answer = post(pieces(b" " * 10_000, pause_s), options)
    assert answer.status_code == 408


def test_the_engine_gets_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    async def generate(self: AsyncClient, **call: Any) -> None:
        given.append(call["timeout_ms"])
        raise Timeout("the deadline passed")

    monkeypatch.setattr(AsyncClient, "generate", generate)
    answer = post(pieces(BODY, 0.01), GatewayOptions(timeout_s=20, patience_s=10))
    assert answer.status_code == 504
    assert 0 < given[0] <= 20_000 - 10 * len(BODY)


def test_an_answer_without_an_end_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def generate(self: AsyncClient, **call: Any) -> Result:
        return Result("Par", "timeout", None, 3, 5, 2, (), None, None, "", None, 0.0)

    monkeypatch.setattr(AsyncClient, "generate", generate)
    with caplog.at_level(logging.INFO, "minisgl_gateway.service"):
        answer = post(pieces(BODY, 0), GatewayOptions())
    assert answer.status_code == 504
    (line,) = caplog.messages
    assert line.endswith(": the deadline passed before the answer was complete")
