"""Clients that leave in the middle of a request, and clients that do not read.

Acts as such clients. ``invariants`` checks the inside of the server.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

from minisgl_client.client import AsyncClient, Client
from minisgl_client.errors import MinisglError

from minisgl_check.asking import Extent
from minisgl_check.case import Case
from minisgl_check.invariants import settled
from minisgl_check.rates import Rates
from minisgl_check.target import Target

_NUM_TOKENS: Final = 16
_LONG: Final = 200
_LATEST_S: Final = 0.2
"""A client that leaves before its first token does so within this time."""
_MOST_SINGLE: Final = 50
FREED_WITHIN_MS: Final = 500.0


class Leavers:
    """Cases of clients that leave one server, at random moments."""

    def __init__(self, target: Target, extent: Extent, rng: random.Random) -> None:
        self._target = target
        self._extent = extent
        self._rng = rng
        self._info = target.stats().info

    def cancel_storm(self, *, num_clients: int | None = None, share: float = 1.0) -> Case:
        """Half of the requests are cut off: before a token, at the first one, or later.

        There are two more clients than rows, unless told otherwise; ``share`` scales the number of
        requests.
        """
        case = Case("cancel storm")
        ended: Counter[str] = Counter()
        clients = num_clients or int(self._info["max_running_requests"]) + 2
        waiting = iter(range(round(share * self._extent.num_cut) * 2))

        async def worker(client: AsyncClient) -> None:
            for index in waiting:
                ended[await self._ask(client, is_cut=index % 2 == 0)] += 1

        async def go() -> None:
            async with (
                AsyncClient(self._target.grpc_address, retries=0) as grpc,
                AsyncClient(self._target.http_url, retries=0) as http,
            ):
                await asyncio.gather(
                    *(worker(http if index % 3 == 2 else grpc) for index in range(clients))
                )

        asyncio.run(go())
        case.count = sum(ended.values())
        for how, count in ended.items():
            case.expect(how in _GOOD_ENDS, f"{count} ended with {how}")
            case.ended[_GOOD_ENDS.get(how, "failed")] += count
        case.what = ", ".join(f"{count} {how}" for how, count in sorted(ended.items()))
        case.expect(settled(self._is_idle), "requests of clients that left are still there")
        return case

    def cancel_alone(self) -> Case:
        """How long an otherwise idle engine works on for a client that left."""
        num = min(_MOST_SINGLE, max(1, self._extent.num_cut // 3))
        case = Case("cancel, one at a time", num)
        freed_ms, made = [], []
        longest = int(self._info["max_sequence_length"])
        pool = int(self._info["num_pages"]) * int(self._info["page_size"])
        with Client(self._target.grpc_address, retries=0) as client:
            for _ in range(num):
                stream = client.stream(
                    input_ids=self._prompt(), max_tokens=min(longest, pool) // 2, ignore_eos=True
                )
                for _ in range(self._rng.randint(1, 8)):
                    next(stream, None)
                before = self._num_generated()
                left_s = time.perf_counter()
                stream.close()
                if not settled(self._is_idle):
                    case.expect(False, "a request was never freed")
                    break
                freed_ms.append(1e3 * (time.perf_counter() - left_s))
                case.ended["cut"] += 1
                made.append(self._num_generated() - before)
        if freed_ms:
            slowest_ms = max(freed_ms)
            case.what = (
                f"freed after {statistics.median(freed_ms):.0f} ms, at most {slowest_ms:.0f}"
            )
            case.figures = {
                "cancel to free p50, ms": statistics.median(freed_ms),
                "cancel to free max, ms": slowest_ms,
                "tokens made after a cancel p50": statistics.median(made),
            }
            if self._extent.is_timed:
                case.expect(slowest_ms <= FREED_WITHIN_MS, f"freed after {slowest_ms:.0f} ms only")
        return case

    def slow_readers(self, rates: Rates) -> Case:
        """Normal clients, and some that ask for much and read nothing."""
        before_mb = self._target.stats().resident_mb
        with ExitStack() as stack:
            num = max(1, int(self._info["max_running_requests"]) // 2)
            for _ in range(min(8, num)):
                stack.enter_context(self.silent())
            case = rates.steady()
            grown_mb = self._target.stats().resident_mb - before_mb
        case.name = "slow readers beside normal ones"
        case.figures = {"memory grown with slow readers, MB": grown_mb}
        case.expect(settled(self._is_idle), "requests of clients that left are still there")
        return case

    @contextmanager
    def silent(self) -> Iterator[None]:
        """A client with a small buffer that asks for a long answer and does not read it."""
        address = urlsplit(self._target.http_url)
        values: dict[str, Any] = {
            "input_ids": self._prompt(),
            "max_tokens": _LONG,
            "ignore_eos": True,
            "stream": True,
            "num_logprobs": 5,
        }
        body = json.dumps(values).encode()
        head = (
            "POST /v2/models/minisgl/generate_stream HTTP/1.1\r\n"
            f"Host: {address.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            connection.connect((address.hostname or "", address.port or 80))
            connection.sendall(head.encode() + body)
            yield

    # --- helpers -----------------------------------------------------------------------------

    async def _ask(self, client: AsyncClient, *, is_cut: bool) -> str:
        """Send one request; returns how it ended."""
        num_tokens = _LONG if is_cut else _NUM_TOKENS
        stream = client.stream(input_ids=self._prompt(), max_tokens=num_tokens, ignore_eos=True)
        num_read = self._rng.choice((0, 1, 1, 5, 20)) if is_cut else num_tokens + 1
        try:
            if num_read == 0:
                await asyncio.wait_for(anext(stream), self._rng.uniform(0, _LATEST_S))
            for _ in range(num_read):
                if await anext(stream, None) is None:
                    break
        except (asyncio.TimeoutError, StopAsyncIteration):
            return "cut"
        except MinisglError as error:
            return error.code if error.code in _GOOD_ENDS else f"{error.code}: {error}"
        finally:
            await stream.aclose()
        if is_cut:
            return "cut"
        return "whole" if stream.result.num_output_tokens == num_tokens else "short"

    def _prompt(self) -> list[int]:
        vocab_size = int(self._info["vocab_size"])
        return [self._rng.randrange(vocab_size) for _ in range(self._rng.randint(4, 200))]

    def _is_idle(self) -> bool:
        return self._target.stats().engine.get("num_open") == 0

    def _num_generated(self) -> int:
        return int(self._target.stats().engine["num_generated_tokens"])


_GOOD_ENDS: Final = {"cut": "cut", "whole": "answered", "UNAVAILABLE": "refused"}
