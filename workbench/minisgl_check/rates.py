"""Loads by their rate: a few clients, many, a burst, and more than the server can answer.

Under any load, each request must end once: with all its tokens, or with a refusal. The loads of a
fixed time are closed loops or arrivals of a Poisson process.
"""

from __future__ import annotations

import random
import time
from typing import Final

from minisgl_check.asking import Asker, Extent
from minisgl_check.case import Case
from minisgl_check.target import Target
from minisgl_kit.calls import Outcome
from minisgl_kit.loads import Load, poisson, run
from minisgl_kit.report import percentiles
from minisgl_kit.targets import TritonTarget

_MANY: Final = 64
"""Number of clients that keep a server on a few cores busy."""
GOODPUT: Final = 0.9
"""The least goodput at twice the capacity, as a share of the capacity."""
REFUSED_WITHIN_MS: Final = 50.0


class Rates(Asker):
    """The steady loads for one server; ``steady`` measures the capacity, which the others use."""

    def __init__(self, target: Target, extent: Extent, rng: random.Random) -> None:
        super().__init__(target, extent, rng)
        self.capacity = 0.0
        """Requests per second, as measured by ``steady``."""

    def steady(self) -> Case:
        """A closed loop of a few clients measures the latency, then one of many the capacity."""
        case = Case("closed loop")
        clients = self._num_clients
        begin_s = time.perf_counter()
        outcomes: list[Outcome] = []

        async def loop(target: TritonTarget) -> None:
            while time.perf_counter() - begin_s < self._extent.load_s:
                load = Load("closed", clients, self._calls(clients * 4), concurrency=clients)
                outcomes.extend(await run(target, load))

        self._drive(loop)
        self._judge(case, outcomes, may_refuse=False)
        rate = len(outcomes) / (time.perf_counter() - begin_s)
        self.capacity = max(rate, self._rate_of_many(rate, case))
        ttft = percentiles(one.ttft_ms for one in outcomes if one.ttft_ms is not None)
        case.what = f"{self.capacity:.1f} requests/s, TTFT p50 {ttft.get('p50', 0.0):.0f} ms"
        case.figures = {
            "capacity, requests/s": self.capacity,
            "TTFT p50, ms": ttft.get("p50", 0.0),
            "TTFT p99, ms": ttft.get("p99", 0.0),
        }
        return case

    def _rate_of_many(self, rate: float, case: Case) -> float:
        """Requests per second while some always wait, so that no row is ever idle."""
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
        # enough to fill it even if the clients, or the server, are slow for a moment
        calls = self._calls(room * 4 + 64)
        load = Load("burst", len(calls), calls, arrivals_s=[0.0] * len(calls))
        outcomes = self._run(load)
        num_refused = self._judge(case, outcomes, may_refuse=True)
        case.expect(num_refused, "nothing was refused")
        case.expect(len(outcomes) - num_refused >= room // 2, "hardly anything was accepted")
        case.what = f"{len(outcomes) - num_refused} answered, {num_refused} refused"
        return case

    def open_loop(self, share: float) -> tuple[Case, list[Outcome]]:
        """Requests at ``share`` of the capacity, whether the server answers or not."""
        case = Case(f"open loop at {share:g} of the capacity")
        rate = share * self.capacity
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
        goodput = (len(outcomes) - num_refused) / seconds / self.capacity
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
