"""The models that a gateway lists, without a server."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from minisgl_client.answer import LoraAdapter, Tokens
from minisgl_client.client import AsyncClient
from minisgl_gateway.app import create_app
from minisgl_gateway.gateway_options import GatewayOptions
from minisgl_gateway.telemetry import Telemetry

ADMIN = {"Authorization": "Bearer admin-key"}


def test_a_model_that_is_unloaded_meanwhile_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> httpx.Response:
        app = create_app(GatewayOptions(admin_keys=("admin-key",)), Telemetry())
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:

            async def adapters(_: AsyncClient) -> list[LoraAdapter]:
                return [LoraAdapter("doll", "/doll")]

            async def unload_adapter(_: AsyncClient, name: str) -> list[LoraAdapter]:
                return []

            async def tokenize(_: AsyncClient, **asked: Any) -> Tokens:
                body = {"lora_name": "doll"}
                path = "/v1/unload_lora_adapter"
                assert (await client.post(path, json=body, headers=ADMIN)).status_code == 200
                return Tokens((0,), ("a",), "a", 10, None)

            for method in (adapters, unload_adapter, tokenize):
                monkeypatch.setattr(AsyncClient, method.__name__, method)
            return await client.get("/v1/models/doll")

    answer = asyncio.run(ask())
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_an_older_list_of_adapters_does_not_replace_that_of_a_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ask() -> list[str]:
        app = create_app(GatewayOptions(admin_keys=("admin-key",)), Telemetry())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:

            async def adapters(_: AsyncClient) -> list[LoraAdapter]:
                body = {"lora_name": "doll", "lora_path": "/doll"}
                path = "/v1/load_lora_adapter"
                assert (await client.post(path, json=body, headers=ADMIN)).status_code == 200
                return []

            async def load_adapter(_: AsyncClient, name: str, path: str) -> list[LoraAdapter]:
                return [LoraAdapter(name, path)]

            async def tokenize(_: AsyncClient, **asked: Any) -> Tokens:
                return Tokens((0,), ("a",), "a", 10, None)

            for method in (adapters, load_adapter, tokenize):
                monkeypatch.setattr(AsyncClient, method.__name__, method)
            return [model["id"] for model in (await client.get("/v1/models")).json()["data"]]

    assert asyncio.run(ask()) == ["minisgl", "doll"]
