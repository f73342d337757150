"""The probe of a gateway, which any client may ask."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from minisgl_client.client import AsyncClient
from minisgl_client.errors import Unavailable
from minisgl_gateway import health, servers
from minisgl_gateway.app import create_app
from minisgl_gateway.gateway_options import GatewayOptions
from minisgl_gateway.telemetry import Telemetry


class Engine:
    """Counts how often it is asked, and is either up or down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_asked = 0
        self.is_there = True

        async def cancel(_: AsyncClient, request_id: str) -> None:
            self.num_asked += 1
            await asyncio.sleep(0)
            if not self.is_there:
                raise Unavailable(f"no {request_id}")

        monkeypatch.setattr(AsyncClient, "cancel", cancel)


def test_one_probe_serves_all_who_ask_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    monkeypatch.setattr(health, "_PROBED_S", 1e6)
    assert statuses(20) == {200}
    assert engine.num_asked == 1


def test_a_probe_is_not_believed_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    monkeypatch.setattr(health, "_PROBED_S", 0.0)

    async def ask() -> list[int]:
        async with gateway() as client:
            before = (await client.get("/health")).status_code
            engine.is_there = False
            return [before, (await client.get("/health")).status_code]

    assert asyncio.run(ask()) == [200, 503]


def test_a_server_that_hangs_does_not_hide_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, hangs = set[str](), {"other:2", "third:3"}
    made: dict[int, str] = {}
    create = AsyncClient.__init__

    def init(client: AsyncClient, address: str, **options: Any) -> None:
        made[id(client)] = address
        create(client, address, **options)

    async def cancel(client: AsyncClient, request_id: str) -> None:
        asked.add(made[id(client)])
        if made[id(client)] in hangs:
            await asyncio.Event().wait()
        if made[id(client)] == "first:1":
            raise Unavailable("it drains")

    monkeypatch.setattr(AsyncClient, "__init__", init)
    monkeypatch.setattr(AsyncClient, "cancel", cancel)
    monkeypatch.setattr(health, "_HEALTH_S", 1e6)
    monkeypatch.setattr(servers, "_PROBE_S", 1e6)

    async def ask() -> int:
        addresses = ("first:1", "other:2", "third:3", "last:4")
        async with gateway(GatewayOptions(servers=addresses)) as client:
            return (await client.get("/health")).status_code

    assert asyncio.run(ask()) == 200
    assert asked == {"first:1", "other:2", "third:3", "last:4"}
    monkeypatch.setattr(servers, "_PROBE_S", 0.01)
    hangs.add("last:4")
    assert asyncio.run(ask()) == 503


def gateway(options: GatewayOptions | None = None) -> httpx.AsyncClient:
    app = create_app(options or GatewayOptions(), Telemetry())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


def statuses(num_callers: int) -> set[int]:
    async def ask() -> set[int]:
        async with gateway() as client:
            answers = await asyncio.gather(*(client.get("/health") for _ in range(num_callers)))
            return {answer.status_code for answer in answers}

    return asyncio.run(ask())
