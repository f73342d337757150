"""Sends requests to a server under load, and judges how they end.

Knows requests and what callers see. Must not know which loads there are, nor the inside of the
server, which ``invariants`` checks.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from minisgl_client.client import AsyncClient
from minisgl_client.errors import MinisglError

from minisgl_check.case import Case
from minisgl_check.target import Target
from minisgl_kit.calls import Call, Outcome
from minisgl_kit.loads import Load, run
from minisgl_kit.targets import Sampling, TritonTarget

NUM_TOKENS: Final = 16
PROMPT_TOKENS: Final = 12


@dataclass(frozen=True, slots=True)
class Extent:
    """The duration of a load, the numbers of requests that are cut off, share prefixes, or bring
    hostile grammars, and the number of adapters that are loaded.

    ``is_timed``: promised times are judged, not only shown; not for busy machines. ``is_long``: all
    loads at the same time are tried, too.
    """

    load_s: float
    num_cut: int
    num_churned: int
    num_hostile: int = 0
    num_loads: int = 0
    is_timed: bool = False
    is_long: bool = False


class Asker:
    """Sends requests to one server; everything random comes from ``rng``."""

    def __init__(self, target: Target, extent: Extent, rng: random.Random) -> None:
        stats = target.stats()
        self._target = target
        self._extent = extent
        self._rng = rng
        self._info = stats.info
        self._num_positions = stats.num_positions

    @property
    def _num_clients(self) -> int:
        """Concurrent clients, few enough that each gets a row."""
        return min(4, int(self._info["max_running_requests"]))

    def _judge(
        self,
        case: Case,
        outcomes: Sequence[Outcome],
        *,
        may_refuse: bool,
        num_tokens: int = NUM_TOKENS,
    ) -> int:
        """Each must have all its tokens, or be refused if allowed; returns the number refused."""
        case.count += len(outcomes)
        errors = Counter(one.error for one in outcomes if one.error is not None)
        for code, count in errors.items():
            case.expect(may_refuse and code == "UNAVAILABLE", f"{count} ended with {code}")
            case.ended["refused" if code == "UNAVAILABLE" else "failed"] += count
        case.ended["answered"] += len(outcomes) - sum(errors.values())
        for one in outcomes:
            short = one.error is None and one.num_output_tokens != num_tokens
            case.expect(not short, f"an answer of {one.num_output_tokens} tokens")
        return sum(errors.values())

    def _calls(self, count: int) -> list[Call]:
        return [Call(NUM_TOKENS, self._prompt()) for _ in range(count)]

    def _prompt(self) -> list[int]:
        vocab_size = int(self._info["vocab_size"])
        return [self._rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS)]

    def _seed(self) -> int:
        return self._rng.randrange(2**31)

    def _run(self, load: Load) -> list[Outcome]:
        found: list[Outcome] = []

        async def go(target: TritonTarget) -> None:
            found.extend(await run(target, load))

        self._drive(go)
        return found

    def _drive(self, job: Callable[[TritonTarget], Coroutine[Any, Any, None]]) -> None:
        async def go() -> None:
            target = TritonTarget(
                self._target.grpc_address, protocol="grpc", model="minisgl", sampling=Sampling()
            )
            try:
                await job(target)
            finally:
                await target.close()

        asyncio.run(go())

    def _ask_all(
        self,
        drawn: Sequence[tuple[Any, Any]],
        ask: Callable[[AsyncClient, Any, Any], Coroutine[Any, Any, None]],
        clients: int,
    ) -> Counter[str]:
        """Ask for each drawn pair, with ``clients`` clients; returns the errors by code."""
        errors: Counter[str] = Counter()
        waiting = iter(drawn)

        async def worker(client: AsyncClient) -> None:
            for first, second in waiting:
                try:
                    await ask(client, first, second)
                except MinisglError as error:
                    errors[error.code] += 1

        async def go() -> None:
            async with AsyncClient(self._target.grpc_address, retries=0) as client:
                await asyncio.gather(*(worker(client) for _ in range(clients)))

        asyncio.run(go())
        return errors
