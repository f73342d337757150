"""The four ways to ask, behind one interface, so that a test can go through all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from minisgl_client import AsyncClient, Client, Delta, Result, Tokens

from minisgl_backend.server.process import TritonServer


def url_of(server: TritonServer, protocol: str) -> str:
    if protocol == "http":
        return f"http://127.0.0.1:{server.http_port}"
    return f"127.0.0.1:{server.grpc_port}"


@dataclass(frozen=True, slots=True)
class Way:
    """A protocol, for threads or for asyncio."""

    protocol: str
    is_async: bool

    def generate(
        self, server: TritonServer | str, settings: Mapping[str, Any] | None = None, **values: Any
    ) -> Result:
        """One whole answer, through a new client."""
        url = server if isinstance(server, str) else url_of(server, self.protocol)

        async def ask() -> Result:
            async with AsyncClient(url, **settings or {}) as client:
                return await client.generate(**values)

        if self.is_async:
            return asyncio.run(ask())
        with Client(url, **settings or {}) as client:
            return client.generate(**values)

    def tokenize(self, server: TritonServer, **values: Any) -> Tokens:
        """The tokens of one prompt, through a new client."""
        url = url_of(server, self.protocol)

        async def ask() -> Tokens:
            async with AsyncClient(url) as client:
                return await client.tokenize(**values)

        if self.is_async:
            return asyncio.run(ask())
        with Client(url) as client:
            return client.tokenize(**values)

    def stream(
        self,
        server: TritonServer | str,
        settings: Mapping[str, Any] | None = None,
        *,
        leave_after: int | None = None,
        **values: Any,
    ) -> tuple[list[Delta], Result]:
        """The deltas of an answer and their sum; closed after ``leave_after`` deltas, if given."""
        url = server if isinstance(server, str) else url_of(server, self.protocol)
        deltas: list[Delta] = []

        async def ask() -> Result:
            async with AsyncClient(url, **settings or {}) as client:
                async with client.stream(**values) as stream:
                    async for delta in stream:
                        deltas.append(delta)
                        if len(deltas) == leave_after:
                            break
                return stream.result

        if self.is_async:
            return deltas, asyncio.run(ask())
        with Client(url, **settings or {}) as client:
            with client.stream(**values) as stream:
                for delta in stream:
                    deltas.append(delta)
                    if len(deltas) == leave_after:
                        break
            return deltas, stream.result


WAYS = (Way("grpc", False), Way("http", False), Way("grpc", True), Way("http", True))
all_ways = pytest.mark.parametrize(
    "way", WAYS, ids=lambda way: f"{way.protocol}{'-asyncio' if way.is_async else ''}"
)
