"""What the metrics of engine and tokenizer share: counts of this process, reported in batches.

A tritonserver dies if several threads of a stub make, set or drop metrics (measured with 24.10 and
26.07). So ``MetricsThread`` makes the metrics on its own thread and hands them to no other. The
counters live outside, safe to write from any thread; the reporting objects never leave the thread.

A report fails if Triton has no room for the message; the next one has what it missed.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)


def engine_labels(model: str, version: str, series: str) -> dict[str, str]:
    """The labels of all metrics of one engine, or of one tokenizer."""
    return {"model": Path(model).name, "version": version, "engine": series}


@dataclass(slots=True)
class ReportedMetric:
    """A metric, and the value that Triton has for it."""

    metric: Any
    value: float = 0.0
    is_set: bool = False
    """Whether a gauge was reported; until then Triton may have the value of a killed engine."""

    def raise_to(self, value: float) -> None:
        """Report the value of a counter."""
        if value > self.value:
            self.metric.increment(value - self.value)
            self.value = value

    def set(self, value: float) -> None:
        """Report the value of a gauge."""
        if value != self.value or not self.is_set:
            self.metric.set(value)
            self.value, self.is_set = value, True


class Reported(Protocol):
    """Metrics inside Triton. All calls, from first to last, are made on one thread."""

    def report(self) -> None:
        """Tell Triton what changed since the last report."""

    def close(self) -> None:
        """Drop all metrics, and then their families, as Triton demands."""


class MetricsThread:
    """The only thread of a model instance that reports metrics to Triton."""

    def __init__(self, make: Callable[[], Reported], *, every_s: float) -> None:
        """``make`` runs on the thread; its error, if any, is raised here.

        When this returns, metrics have been reported once.
        """
        self._every_s = every_s
        self._made: Future[None] = Future()
        self._fails = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(make,), name="metrics", daemon=True)
        self._thread.start()
        self._made.result()

    def stop(self) -> bool:
        """Report what is left and drop the metrics. Does not wait; returns whether it is done."""
        self._closing.set()
        return not self._thread.is_alive()

    def close(self) -> None:
        """Report what is left, drop the metrics and end the thread."""
        self.stop()
        self._thread.join()

    def _run(self, make: Callable[[], Reported]) -> None:
        try:
            metrics = make()
        except Exception as error:
            self._made.set_exception(error)
            return
        self._report(metrics)  # or constant gauges would be 0 until the next report
        self._made.set_result(None)
        while not self._closing.wait(self._every_s):
            self._report(metrics)
        self._report(metrics)
        metrics.close()

    def _report(self, metrics: Reported) -> None:
        try:
            metrics.report()
            self._fails = False
        except Exception:
            if not self._fails:
                logger.exception("metrics cannot be reported")
            self._fails = True


class BucketCounts:
    """A histogram counted here: cumulative counts by upper bound, a sum and a count."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self._buckets = tuple(buckets)
        self.bounds = (*(f"{bucket:g}" for bucket in self._buckets), "+Inf")
        """The ``le`` of each bucket."""
        self._lock = threading.Lock()
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        with self._lock:
            self._counts[bisect.bisect_left(self._buckets, value)] += 1
            self._sum += value

    def totals(self) -> dict[str, float]:
        """For all values so far: the counts by each bucket's ``le``, their sum and their number."""
        with self._lock:
            running, total = list(itertools.accumulate(self._counts)), self._sum
        by_bound = dict(zip(self.bounds, running, strict=True))
        return {**by_bound, "sum": total, "count": running[-1]}
