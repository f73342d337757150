"""Several servers of one model, asked as if they were one: the calls of ``AsyncClient``, balanced.

Requests with the same beginning go to the same server, whose prefix cache then has it. A request
that a server refuses or loses before its first token goes to another one, once. While requests are
open at a server, it is asked whether it is still there: if it hangs, or a cable was cut, the
connection would show that only after minutes. Knows which errors count against a server;
``balance`` knows what follows from them. Must not know any API's JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias, TypeVar

from minisgl_client.answer import Delta, LoraAdapter, Result, Tokens
from minisgl_client.client import AsyncClient
from minisgl_client.errors import (
    Cancelled,
    ConnectionFailed,
    ConnectionLost,
    MinisglError,
    ServerError,
    Timeout,
    Unavailable,
    Unsupported,
)

from minisgl_gateway.balance import Balance
from minisgl_gateway.engine_errors import is_lost

_Answer = TypeVar("_Answer")

logger = logging.getLogger(__name__)

_BEGINNING: Final = 4096
"""The number of characters at the beginning of a prompt that decide where it goes."""
_FIRST_TOKENS: Final = 512
_PROBE_S: Final = 5.0
_LOOK_EVERY_S: Final = 2.0
_ANSWERS_WITHIN_S: Final = 4.0
"""Triton's own threads answer in this time, whatever its models do."""
_MOST_MISSED: Final = 2
"""After this many looks in a row without an answer, a server counts as silent."""
_PASSING: Final = (Unavailable, ConnectionFailed, ConnectionLost)
"""Errors after which another server may answer."""
_FULL: Final = ("queue full", "too many grammars")
"""What a server says that works but is fully loaded."""


class Servers:
    """An ``Engine`` that consists of several servers. Belongs to one event loop."""

    def __init__(self, addresses: Sequence[str], model: str) -> None:
        """Raises ``InvalidArgument`` if one of the ``addresses`` is not valid."""
        self._addresses = list(addresses)
        self._model = model
        self._clients = [self._client(address) for address in addresses]
        self._balance = Balance(self._addresses)
        self._calls: set[asyncio.Task[None]] = set()
        self._watched: set[int] = set()

    async def generate(self, /, **call: Any) -> Result:
        """The whole answer; raises ``MinisglError``."""

        async def ask(client: AsyncClient) -> Result:
            return await client.generate(**call)

        return await self._asked(ask, beginning(call))

    @asynccontextmanager
    async def stream(self, /, **call: Any) -> AsyncIterator[AsyncIterator[Delta]]:
        """The answer as it comes; leaving the block cancels it."""
        key, tried = beginning(call), list[int]()
        while True:
            server = self._chosen(key, tried)
            client = self._clients[server]
            try:
                async with client.stream(**call) as deltas:
                    try:
                        first = await anext(deltas, None)
                        self._balance.worked(server)
                    except MinisglError as error:
                        noted = self._noted(server, client, error)
                        if tried or not _may_pass(noted):
                            raise noted from None
                        tried.append(server)
                        continue
                    yield self._rest(server, client, first, deltas)
                    return
            finally:
                self._balance.ended(server)

    async def tokenize(self, /, *prompt: str, **call: Any) -> Tokens:
        """The prompt's tokens; raises ``MinisglError``."""

        async def ask(client: AsyncClient) -> Tokens:
            return await client.tokenize(*prompt, **call)

        return await self._asked(ask, beginning({"prompt": "".join(prompt), **call}))

    async def cancel(self, request_id: str) -> None:
        """Cancel all requests of that id, at all servers. Returns as soon as one has done so, while
        others are still told; raises ``MinisglError`` if none can be reached."""
        calls = {self._in_background(_bounded(each.cancel(request_id))) for each in self._clients}
        while calls:
            done, calls = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            if any(not call.cancelled() and call.exception() is None for call in done):
                return
        raise ConnectionFailed("no server takes requests")

    async def adapters(self) -> Sequence[LoraAdapter]:
        """The LoRA adapters, which all servers should have; raises ``MinisglError``."""

        async def ask(client: AsyncClient) -> Sequence[LoraAdapter]:
            return await client.adapters()

        return await self._asked(ask, b"adapters")

    async def load_adapter(self, name: str, path: str) -> Sequence[LoraAdapter]:
        """Not offered: raises ``Unsupported``."""
        raise Unsupported(f"{name} has to be loaded at each of the servers, not through --server")

    async def unload_adapter(self, name: str) -> Sequence[LoraAdapter]:
        """Not offered: raises ``Unsupported``."""
        raise Unsupported(f"{name} has to be unloaded at each of the servers, not through --server")

    async def aclose(self) -> None:
        """Close all connections."""
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        for client in self._clients:
            await client.aclose()

    async def _asked(self, ask: Callable[[AsyncClient], Awaitable[_Answer]], key: bytes) -> _Answer:
        tried: list[int] = []
        while True:
            server = self._chosen(key, tried)
            client = self._clients[server]
            try:
                answer = await ask(client)
                self._balance.worked(server)
                return answer
            except MinisglError as error:
                noted = self._noted(server, client, error)
                if tried or not _may_pass(noted):
                    raise noted from None
                tried.append(server)
            finally:
                self._balance.ended(server)

    async def _rest(
        self, server: int, client: AsyncClient, first: Delta | None, deltas: AsyncIterator[Delta]
    ) -> AsyncIterator[Delta]:
        if first is None:
            return
        yield first
        try:
            async for delta in deltas:
                yield delta
        except MinisglError as error:
            raise self._noted(server, client, error) from None

    def _client(self, address: str) -> AsyncClient:
        return AsyncClient(address, protocol="grpc", model=self._model, retries=0)

    # --- health ------------------------------------------------------------------------------

    def _chosen(self, key: bytes, tried: Sequence[int]) -> int:
        for server in self._balance.due_probes(time.monotonic()):
            self._in_background(self._probe(server))
        chosen = self._balance.choose(key, tried)
        if chosen not in self._watched:
            self._watched.add(chosen)
            self._in_background(self._watch(chosen))
        return chosen

    def _in_background(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Make a call, whether or not anyone waits for its end."""
        task = asyncio.ensure_future(call)
        self._calls.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits for it gets it, too

    async def _probe(self, server: int) -> None:
        """Ask an ejected server whether it takes requests again."""
        try:
            await _bounded(self._clients[server].cancel(f"probe-{uuid.uuid4().hex}"))
        except Exception:  # whatever it was, the probe has ended
            self._balance.probed(server, time.monotonic(), works=False)
        else:
            self._balance.probed(server, time.monotonic(), works=True)
            logger.info("%s takes requests again", self._addresses[server])

    async def _watch(self, server: int) -> None:
        """Look at a server until no request is open there."""
        num_missed = 0
        try:
            while self._balance.num_open(server):
                await asyncio.sleep(_LOOK_EVERY_S)
                num_missed = 0 if await self._is_there(server) else num_missed + 1
                if num_missed == _MOST_MISSED:
                    await self._cut(server)
                    return
        finally:
            self._watched.discard(server)

    async def _is_there(self, server: int) -> bool:
        """Whether a server answers at all, even that it is not ready; refusals count elsewhere."""
        try:
            await asyncio.wait_for(self._clients[server].is_ready(), _ANSWERS_WITHIN_S)
        except asyncio.TimeoutError:
            return False
        return True

    async def _cut(self, server: int) -> None:
        """End the connection to a silent server, and with it everything that waits for it."""
        self._failed(server, "it is silent", is_ending=True)
        address, silent = self._addresses[server], self._clients[server]
        self._clients[server] = self._client(address)
        await silent.aclose()

    def _noted(self, server: int, client: AsyncClient, error: MinisglError) -> MinisglError:
        """Count an error, if it speaks against the server; returns the error to report. ``client``
        is the one that raised it."""
        if isinstance(error, Cancelled) and client is not self._clients[server]:
            return ConnectionLost(f"{self._addresses[server]} is silent")
        if isinstance(error, (Cancelled, Timeout)):
            return error  # the caller caused it, or its deadline
        is_ending = isinstance(error, Unavailable)
        if is_ending and any(reason in str(error) for reason in _FULL):
            return error
        if isinstance(error, (*_PASSING, ServerError)):
            self._failed(server, str(error), is_ending=is_ending)
        else:
            self._balance.worked(server)
        return error

    def _failed(self, server: int, why: str, *, is_ending: bool) -> None:
        was_ejected = self._balance.is_ejected(server)
        self._balance.failed(server, time.monotonic(), is_ending=is_ending)
        if self._balance.is_ejected(server) and not was_ejected:
            logger.warning("%s gets no requests for now: %s", self._addresses[server], why)


def _may_pass(error: MinisglError) -> bool:
    """Whether another server may answer what this one did not."""
    return isinstance(error, _PASSING) or is_lost(error)


async def _bounded(call: Awaitable[None]) -> None:
    """Wait for a call that a server must answer soon."""
    await asyncio.wait_for(call, _PROBE_S)


Engine: TypeAlias = AsyncClient | Servers
"""What answers requests."""


def beginning(call: Mapping[str, Any]) -> bytes:
    """What decides where a request goes: its salt, and a prompt's beginning, which stays the same
    in later turns of a conversation."""
    found: list[Any] = [call.get("cache_salt")]
    if messages := call.get("messages"):
        roles = [message.get("role") for message in messages]
        end = roles.index("user") + 1 if "user" in roles else len(roles)
        found += messages[:end]
    elif (ids := call.get("input_ids")) is not None:
        found += ids[:_FIRST_TOKENS]
    else:
        found.append(call.get("prompt"))
    return json.dumps(found, sort_keys=True, default=str)[:_BEGINNING].encode()
