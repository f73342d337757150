"""Load shapes: each puts a kind of pressure on the server and looks at what callers get.

Knows requests and what callers see. Must not know how the server does it: what is left inside is
for ``invariants``.

Whatever the pressure, each request ends once: with all its tokens, or with a refusal. The shapes of
a fixed time are closed loops or arrivals of a Poisson process; the seed draws all that is random.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from minisgl_client.client import AsyncClient
from minisgl_client.errors import MinisglError

from minisgl_backend.bench.serve.calls import Call
from minisgl_backend.bench.serve.figures import percentiles
from minisgl_backend.bench.serve.loads import Load, poisson
from minisgl_backend.bench.serve.outcome import Outcome
from minisgl_backend.bench.serve.run import run
from minisgl_backend.bench.serve.targets import Sampling, TritonTarget
from minisgl_backend.check.case import Case, skipped
from minisgl_backend.check.target import Target

_NUM_TOKENS: Final = 16
_PROMPT_TOKENS: Final = 12
_MANY: Final = 64
"""Clients that keep a server on a few cores busy."""
GOODPUT: Final = 0.9
"""At twice the capacity, of the capacity."""
REFUSED_WITHIN_MS: Final = 50.0


@dataclass(frozen=True, slots=True)
class Extent:
    """How long and how much; ``is_timed``: promises about times are judged, not only shown."""

    load_s: float
    num_cut: int
    num_churned: int
    is_timed: bool


class Shapes:
    """All shapes for one server; what one learns (the capacity) the next may use."""

    def __init__(self, target: Target, extent: Extent, rng: random.Random) -> None:
        stats = target.stats()
        self._target = target
        self._extent = extent
        self._rng = rng
        self._info = stats.info
        self._num_positions = stats.num_positions
        self._capacity = 0.0

    def steady(self) -> Case:
        """A closed loop of a few clients: the latency; then of many: the capacity."""
        case = Case("closed loop")
        clients = min(4, int(self._info["max_running_requests"]))
        begin_s = time.perf_counter()
        outcomes: list[Outcome] = []

        async def loop(target: TritonTarget) -> None:
            while time.perf_counter() - begin_s < self._extent.load_s:
                load = Load("closed", clients, self._calls(clients * 4), concurrency=clients)
                outcomes.extend(await run(target, load))

        self._drive(loop)
        self._judge(case, outcomes, may_refuse=False)
        rate = len(outcomes) / (time.perf_counter() - begin_s)
        self._capacity = max(rate, self._rate_of_many(rate, case))
        ttft = percentiles(one.ttft_ms for one in outcomes if one.ttft_ms is not None)
        case.what = f"{self._capacity:.1f} requests/s, TTFT p50 {ttft.get('p50', 0.0):.0f} ms"
        case.figures = {
            "capacity, requests/s": self._capacity,
            "TTFT p50, ms": ttft.get("p50", 0.0),
            "TTFT p99, ms": ttft.get("p99", 0.0),
        }
        return case

    def _rate_of_many(self, rate: float, case: Case) -> float:
        """Requests a second while some always wait, so that no row is ever idle."""
        clients = min(_MANY, 2 * int(self._info["max_running_requests"]))
        calls = self._calls(max(2 * clients, round(rate * self._extent.load_s)))
        outcomes = self._run(Load("closed", clients, calls, concurrency=clients))
        self._judge(case, outcomes, may_refuse=False)
        seconds = max(one.ended_s for one in outcomes) - min(one.due_s for one in outcomes)
        return len(outcomes) / seconds

    def burst(self) -> Case:
        """More requests at once than may run and wait."""
        case = Case("burst over the queue")
        room = int(self._info["max_running_requests"]) + int(self._info["max_queued_requests"])
        calls = self._calls(room * 2 + 16)
        load = Load("burst", len(calls), calls, arrivals_s=[0.0] * len(calls))
        outcomes = self._run(load)
        num_refused = self._judge(case, outcomes, may_refuse=True)
        case.expect(num_refused, "nothing was refused")
        case.expect(len(outcomes) - num_refused >= room // 2, "hardly anything was accepted")
        case.what = f"{len(outcomes) - num_refused} answered, {num_refused} refused"
        return case

    def open_loop(self, share: float) -> tuple[Case, list[Outcome]]:
        """As many requests as that share of the capacity, whether the server answers or not."""
        case = Case(f"open loop at {share:g} of the capacity")
        rate = share * self._capacity
        calls = self._calls(max(1, round(rate * self._extent.load_s)))
        outcomes = self._run(poisson(calls, rate, seed=self._seed()))
        self._judge(case, outcomes, may_refuse=True)
        return case, outcomes

    def overload(self) -> Case:
        """Twice as many requests as the server can answer."""
        before_mb = self._target.stats().resident_mb
        case, outcomes = self.open_loop(2.0)
        case.name = "open loop at twice the capacity"
        num_refused = sum(one.error is not None for one in outcomes)
        grown_mb = self._target.stats().resident_mb - before_mb
        seconds = max(one.ended_s for one in outcomes) - min(one.due_s for one in outcomes)
        goodput = (len(outcomes) - num_refused) / seconds / self._capacity
        refused = percentiles(one.e2e_ms for one in outcomes if one.error is not None)
        waits = [one.ttft_ms for one in outcomes if one.ttft_ms is not None]
        case.what = f"goodput {goodput:.2f} of the capacity, {num_refused} refused"
        case.figures = {
            "goodput at twice the capacity": goodput,
            "refused": num_refused,
            "refusals p50, ms": refused.get("p50", 0.0),
            "refusals p99, ms": refused.get("p99", 0.0),
            "longest wait for a first token, ms": max(waits, default=0.0),
            "memory grown under overload, MB": grown_mb,
        }
        case.expect(len(waits), "nothing was answered")
        if self._extent.is_timed:
            case.expect(goodput >= GOODPUT, f"goodput {goodput:.2f} of the capacity")
            p99_ms = refused.get("p99", 0.0)
            case.expect(p99_ms <= REFUSED_WITHIN_MS, f"refusals took {p99_ms:.0f} ms (p99)")
        return case

    def churn(self) -> Case:
        """Many chats with a few beginnings, over a cache that cannot hold them all."""
        case = Case("prefix churn")
        facts = ("hot", "big", "fast", "old", "high", "full", "light", "rich")
        asked = ("France", "Italy", "Spain", "Japan", "Norway", "Kenya")
        histories = [facts[i:] + facts[:i] for i in range(len(facts))]
        answers: dict[str, set[str]] = {}

        async def ask(client: AsyncClient, history: Sequence[str], country: str) -> None:
            messages = [
                {"role": role, "content": content}
                for word in history
                for role, content in (
                    ("user", f"What is the opposite of {word}?"),
                    ("assistant", "I do not know."),
                )
            ]
            messages.append({"role": "user", "content": f"What is the capital of {country}?"})
            result = await client.generate(messages=messages, max_tokens=8, temperature=0.0)
            answers.setdefault(f"{history[0]}, {country}", set()).add(result.text)

        before = self._target.stats().engine["scheduler"]
        drawn = [
            (self._rng.choice(histories), self._rng.choice(asked))
            for _ in range(self._extent.num_churned)
        ]
        clients = min(4, int(self._info["max_running_requests"]))
        errors = self._ask_all(drawn, ask, clients)
        after = self._target.stats().engine["scheduler"]
        case.count = len(drawn)
        case.ended["answered"] = len(drawn) - sum(errors.values())
        for code, count in errors.items():
            case.expect(False, f"{count} ended with {code}")
            case.ended["failed"] += count
        for name, texts in answers.items():
            case.expect(len(texts) == 1, f"the answers to {name!r} differ: {sorted(texts)}")
        queries = after["prefix_queries"] - before["prefix_queries"]
        hits = after["prefix_hits"] - before["prefix_hits"]
        case.expect(hits, "no prefix was found again")
        case.what = f"{100 * hits / max(1, queries):.0f} % of the prompt tokens were cached"
        return case

    def small_pool(self) -> Case:
        """Eight clients whose requests fill the pages if two and a half of them run."""
        name = "pages for 2.5 requests"
        length = int(self._num_positions / 2.5)
        if length > int(self._info["max_sequence_length"]):
            return skipped(name, "the server has pages for longer requests than there are")
        clients = min(8, int(self._info["max_running_requests"]) + 4)
        case = Case(name)
        before = self._target.stats().engine["scheduler"]["num_retractions"]
        num_tokens = length - _PROMPT_TOKENS
        calls = [
            Call(num_tokens, self._prompt())
            for _ in range(clients * max(1, round(self._extent.load_s / 15)))
        ]
        outcomes = self._run(Load("pool", clients, calls, concurrency=clients))
        self._judge(case, outcomes, may_refuse=False, num_tokens=num_tokens)
        retractions = self._target.stats().engine["scheduler"]["num_retractions"] - before
        longest_s = max(one.e2e_ms for one in outcomes) / 1e3
        case.what = f"{retractions} retractions, longest request {longest_s:.1f} s"
        case.figures = {"retractions": retractions}
        return case

    def poisoned(self) -> Case:
        """One request in five is wrong; the others must not notice."""
        case = Case("one request in five is bad")
        ended: Counter[str] = Counter()

        async def ask(client: AsyncClient, is_bad: bool, prompt: list[int]) -> None:
            wrong: dict[str, Any] = {"temperature": -1.0} if is_bad else {}
            try:
                result = await client.generate(
                    input_ids=prompt, max_tokens=_NUM_TOKENS, ignore_eos=True, **wrong
                )
            except MinisglError as error:
                ended[f"bad: {error.code}" if is_bad else f"good: {error.code}"] += 1
                return
            whole = result.num_output_tokens == _NUM_TOKENS
            ended["bad: answered" if is_bad else f"good: {'whole' if whole else 'short'}"] += 1

        num = max(40, round(self._capacity * self._extent.load_s))
        drawn = [(index % 5 == 0, self._prompt()) for index in range(num)]
        self._ask_all(drawn, ask, min(4, int(self._info["max_running_requests"])))
        case.count = num
        ends = {"bad: INVALID_ARG": "refused", "good: whole": "answered"}
        for how, count in ended.items():
            case.expect(how in ends, f"{count} are {how}")
            case.ended[ends.get(how, "failed")] += count
        case.what = ", ".join(f"{count} {how}" for how, count in sorted(ended.items()))
        return case

    # --- helpers -----------------------------------------------------------------------------

    def _judge(
        self,
        case: Case,
        outcomes: Sequence[Outcome],
        *,
        may_refuse: bool,
        num_tokens: int = _NUM_TOKENS,
    ) -> int:
        """Each must have all its tokens, or a refusal where that may be; how many were refused."""
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
        return [Call(_NUM_TOKENS, self._prompt()) for _ in range(count)]

    def _prompt(self) -> list[int]:
        vocab_size = int(self._info["vocab_size"])
        return [self._rng.randrange(vocab_size) for _ in range(_PROMPT_TOKENS)]

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
        """Ask for each of the drawn, so many at a time; the errors by code."""
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
