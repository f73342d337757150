"""`minisgl bench router`: prefix hits and balance of simulated replicas, by routing rule.

Each replica has a real radix cache and a simple clock: free rows are taken in the order of arrival,
prompts are computed one after another at a fixed rate, and each row gets a token at a fixed
interval. Traces are skewed: some prefixes, and some sessions, have much more of the load than
others. The same trace goes through one engine that has the caches, rows and rates of all replicas
together; its prefix hits are what any routing can reach.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import click
import numpy as np

from minisgl_backend.cache.kv import Lease, Verified
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.request import IntArray
from minisgl_backend.routing.cache_index import CacheIndex
from minisgl_backend.routing.keys import Keys, Replicas
from minisgl_backend.routing.router import Balance, Placement, ReplicaCapacity, Router
from minisgl_bench.garbage import frozen_objects
from minisgl_kit.option_types import POSITIVE, POSITIVE_INT, SEED, FiniteRange
from minisgl_kit.report import Report, json_option
from minisgl_kit.routing import reports_to, shares_of_load

_PAGE_SIZE: Final = 16
_NUM_PAGES: Final = 8192
_NUM_ROWS: Final = 64
_STEP_TOKENS: Final = 8192
_PREFILL_RATE: Final = 20_000
"""Prompt tokens per second."""
_TOKEN_S: Final = 0.02
"""Seconds between two tokens of a row."""
_MEAN_ROWS: Final = 24
"""Requests that a replica has on average; traces start enough sessions for that."""
_VOCAB_SIZE: Final = 150_000


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a session: the tokens that it adds to the previous ones, how many come back, and
    the seconds after the previous answer."""

    tokens: IntArray
    output: IntArray
    pause_s: float


@dataclass(frozen=True, slots=True)
class Session:
    """Requests that each continue the previous one."""

    start_s: float
    turns: Sequence[Turn]


class Trace:
    """Draws sessions of each kind of load for ``num_engines``, which begin within ``seconds``."""

    def __init__(self, num_engines: int, seconds: float, seed: int) -> None:
        self.num_engines = num_engines
        self.seconds = seconds
        self._draws = np.random.default_rng(seed)

    def sessions(self, draw: Callable[[], list[Turn]]) -> list[Session]:
        """Sessions that begin at random times, as many as keep the engines' rows busy."""
        found, busy_s, wanted_s = [], 0.0, _MEAN_ROWS * self.seconds * self.num_engines
        while busy_s < wanted_s:
            turns = draw()
            busy_s += sum(len(turn.output) * _TOKEN_S for turn in turns)
            found.append(Session(float(self._draws.uniform(0, self.seconds)), turns))
        return found

    def conversations(self) -> list[Session]:
        """Short system prompts; a few sessions have many turns, most have few."""
        prompts = self._prefixes(8, 100, 400)

        def draw() -> list[Turn]:
            num_turns = min(int(self._draws.zipf(1.7)) + 1, 12)
            first = self._picked(prompts, 1.2)
            return [
                Turn(
                    np.concatenate([first if turn == 0 else first[:0], self._tokens(20, 200)]),
                    self._tokens(100, 600),
                    float(self._draws.exponential(3)),
                )
                for turn in range(num_turns)
            ]

        return self.sessions(draw)

    def few_shot(self) -> list[Session]:
        """Single requests, each one of many long common prefixes and a short question."""
        prefixes = self._prefixes(8 * self.num_engines, 1000, 3000)

        def draw() -> list[Turn]:
            tokens = np.concatenate([self._picked(prefixes, 1.0), self._tokens(30, 100)])
            return [Turn(tokens, self._tokens(50, 200), 0.0)]

        return self.sessions(draw)

    def agents(self) -> list[Session]:
        """Long instructions that many sessions share, then many short turns in quick succession."""
        prefixes = self._prefixes(max(4, self.num_engines // 2), 2000, 4000)

        def draw() -> list[Turn]:
            first = self._picked(prefixes, 1.0)
            return [
                Turn(
                    np.concatenate([first if turn == 0 else first[:0], self._tokens(50, 400)]),
                    self._tokens(60, 240),
                    float(self._draws.exponential(0.5)),
                )
                for turn in range(int(self._draws.integers(3, 20)))
            ]

        return self.sessions(draw)

    def _tokens(self, least: int, most: int) -> IntArray:
        length = int(self._draws.integers(least, most + 1))
        return self._draws.integers(0, _VOCAB_SIZE, length, dtype=np.int32)

    def _prefixes(self, number: int, least: int, most: int) -> list[IntArray]:
        return [self._tokens(least, most) for _ in range(number)]

    def _picked(self, prefixes: list[IntArray], skew: float) -> IntArray:
        """A prefix drawn by Zipf's law: the n-th with a probability proportional to n ** -skew."""
        weights = np.arange(1, len(prefixes) + 1, dtype=np.float64) ** -skew
        return prefixes[int(self._draws.choice(len(prefixes), p=weights / weights.sum()))]


class RoundRobin(Router):
    """Takes one replica after the other."""

    def choose(self, keys: Keys, favoured: Replicas = 0) -> tuple[int, int]:
        replica = sum(self.num_routed) % self.index.num_replicas
        return replica, self.index.longest(keys, 1 << replica)[0]


class LeastLoaded(Router):
    """Takes the replica with the least load, whatever it has cached."""

    def choose(self, keys: Keys, favoured: Replicas = 0) -> tuple[int, int]:
        replica = self.least_loaded(self.up)
        assert replica is not None
        return replica, self.index.longest(keys, 1 << replica)[0]


RULES: Final[dict[str, type[Router]]] = {
    "prefix": Router,
    "least loaded": LeastLoaded,
    "round robin": RoundRobin,
}
TRACES: Final[dict[str, Callable[[Trace], list[Session]]]] = {
    "conversations": Trace.conversations,
    "few-shot": Trace.few_shot,
    "agents": Trace.agents,
}


@dataclass(slots=True, eq=False)
class _Request:
    session: Session
    turn: int
    prompt: IntArray
    placement: Placement
    arrived_s: float
    lease: Lease | None = None

    @property
    def output(self) -> IntArray:
        return self.session.turns[self.turn].output


@dataclass(slots=True, eq=False)
class _Engine:
    """A replica: its cache, its queue, and how busy it has been."""

    cache: RadixCache
    num_rows: int
    prefill_rate: float
    queue: deque[_Request] = field(default_factory=deque)
    num_running: int = 0
    prefill_free_s: float = 0.0
    busy_s: float = 0.0
    """The time of all its requests, from arrival to end."""
    tokens: int = 0
    """Prompt tokens that were computed, and tokens of answers."""


class Simulation:
    """One trace through the replicas of one router."""

    def __init__(
        self, rule: type[Router], num_engines: int, balance: Balance, *, scale: int = 1
    ) -> None:
        """Each engine has ``scale`` times the pages, rows and rates of a replica."""
        num_pages = _NUM_PAGES * scale
        self._cache_index = CacheIndex(num_engines, num_pages)
        self._router = rule(
            self._cache_index,
            page_size=_PAGE_SIZE,
            capacity=ReplicaCapacity(_NUM_ROWS * scale, _STEP_TOKENS * scale, num_pages),
            balance=balance,
        )
        self._engines = [
            _Engine(
                RadixCache(
                    num_pages, _PAGE_SIZE, watch=reports_to(self._cache_index, replica, _PAGE_SIZE)
                ),
                _NUM_ROWS * scale,
                _PREFILL_RATE * scale,
            )
            for replica in range(num_engines)
        ]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._now_s = 0.0
        self._prompt_tokens = 0
        self._hit_tokens = 0
        self.decisions_us: list[float] = []
        """The processor time that each took, in the order of arrival."""
        self._first_tokens_s: list[float] = []

    def run(self, sessions: Sequence[Session]) -> dict[str, float]:
        """The figures of the trace; every request is answered."""
        for session in sessions:
            first = partial(self._arrive, session, 0, session.turns[0].tokens)
            self._at(session.start_s, first)
        while self._events:
            self._now_s, _, happen = heapq.heappop(self._events)
            happen()
        busy = np.array([engine.busy_s for engine in self._engines])
        tokens = np.array([engine.tokens for engine in self._engines])
        assert not shares_of_load(self._router).any()
        return {
            "requests": len(self.decisions_us),
            "hit_rate": self._hit_tokens / self._prompt_tokens,
            "busiest_rows": float(busy.max() / busy.mean()),
            "busiest_tokens": float(tokens.max() / tokens.mean()),
            "ttft_p50_ms": 1e3 * float(np.percentile(self._first_tokens_s, 50)),
            "ttft_p99_ms": 1e3 * float(np.percentile(self._first_tokens_s, 99)),
        }

    def _at(self, time_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), happen))

    def _arrive(self, session: Session, turn: int, prompt: IntArray) -> None:
        began = time.thread_time()
        placement = self._router.route(prompt, "")
        self.decisions_us.append(1e6 * (time.thread_time() - began))
        assert placement is not None
        engine = self._engines[placement.replica]
        engine.queue.append(_Request(session, turn, prompt, placement, self._now_s))
        self._admit(engine)

    def _admit(self, engine: _Engine) -> None:
        """Let requests take rows, the oldest first, as long as rows and pages last."""
        while engine.queue and engine.num_running < engine.num_rows:
            request, cache = engine.queue[0], engine.cache
            lease = cache.acquire(request.prompt, "")
            num_pages = len(lease.pages)
            if not cache.grow(lease, len(request.prompt) + len(request.output)):
                cache.release(lease)
                assert engine.num_running, "a request does not fit an empty engine"
                return
            engine.queue.popleft()
            engine.num_running += 1
            request.lease = lease
            hits = num_pages * _PAGE_SIZE
            computed = len(request.prompt) - hits
            self._prompt_tokens += len(request.prompt)
            self._hit_tokens += hits
            engine.tokens += computed + len(request.output)
            begin_s = max(self._now_s, engine.prefill_free_s)
            engine.prefill_free_s = begin_s + computed / engine.prefill_rate
            self._at(engine.prefill_free_s, partial(self._computed, engine, request))

    def _computed(self, engine: _Engine, request: _Request) -> None:
        self._first_tokens_s.append(self._now_s - request.arrived_s)
        self._publish(engine, request, request.prompt)
        self._router.computed(request.placement)
        end_s = self._now_s + len(request.output) * _TOKEN_S
        self._at(end_s, partial(self._finish, engine, request))

    def _finish(self, engine: _Engine, request: _Request) -> None:
        tokens = np.concatenate([request.prompt, request.output])
        self._publish(engine, request, tokens)
        assert request.lease is not None
        engine.cache.release(request.lease)
        engine.num_running -= 1
        engine.busy_s += self._now_s - request.arrived_s
        self._router.end(request.placement)
        self._admit(engine)
        turn = request.turn + 1
        if turn < len(request.session.turns):
            next_turn = request.session.turns[turn]
            prompt = np.concatenate([tokens, next_turn.tokens])
            self._at(
                self._now_s + next_turn.pause_s,
                partial(self._arrive, request.session, turn, prompt),
            )

    def _publish(self, engine: _Engine, request: _Request, tokens: IntArray) -> None:
        lease = request.lease
        assert lease is not None
        engine.cache.publish(lease, tokens, verified=Verified.ALL)


@click.command()
@click.option(
    "--engines",
    multiple=True,
    type=POSITIVE_INT,
    default=(8, 64),
    show_default=True,
    help="number of replicas; may be repeated",
)
@click.option(
    "--ratio",
    type=FiniteRange(min=1),
    default=Balance().ratio,
    show_default=True,
    help="a replica with a cached prefix may have this many times the mean load",
)
@click.option(
    "--slack",
    type=FiniteRange(min=0),
    default=Balance().slack,
    show_default=True,
    help="and this share of its capacity more",
)
@click.option(
    "--seconds",
    type=POSITIVE,
    default=40.0,
    show_default=True,
    help="within which the sessions of a trace begin",
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="of the traces")
@click.option(
    "--runs",
    type=POSITIVE_INT,
    default=1,
    show_default=True,
    help="of each trace; the least time of each decision counts",
)
@json_option
def router(
    engines: tuple[int, ...],
    ratio: float,
    slack: float,
    seconds: float,
    seed: int,
    runs: int,
    json_path: Path | None,
) -> None:
    """Prefix hits, balance and time for a decision, by routing rule.

    "of one cache": prefix hits as a share of those that one engine with the caches of all would
    have. "busiest": the largest over the mean, of the rows that engines have over time, and of the
    tokens that they compute. Times for a decision are those of the processor, so the time in which
    other processes run does not count; what they do to its caches does. All runs of a trace are the
    same, so with several the least time of each decision is that without disturbance.
    """
    report = Report("Routing of requests to simulated replicas")
    balance = Balance(ratio, slack)
    for num_engines in engines:
        for name, drawn in TRACES.items():
            sessions = drawn(Trace(num_engines, seconds, seed))
            with frozen_objects():
                alone = Simulation(Router, 1, balance, scale=num_engines).run(sessions)
            for rule_name, rule in RULES.items():
                times_us = []
                for _ in range(runs):
                    simulation = Simulation(rule, num_engines, balance)
                    with frozen_objects():
                        figures = simulation.run(sessions)
                    times_us.append(simulation.decisions_us)
                decisions_us = np.min(times_us, axis=0)
                best = alone["hit_rate"]
                report.add(
                    engines=num_engines,
                    trace=name,
                    rule=rule_name,
                    of_one_cache=figures["hit_rate"] / best if best else None,
                    **figures,
                    decision_p50_us=float(np.percentile(decisions_us, 50)),
                    decision_p99_us=float(np.percentile(decisions_us, 99)),
                )
    report.emit(json_path)
