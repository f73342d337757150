"""What the metrics of engine and tokenizer share: counters of this process, reported in batches.

A report fails if Triton has no room for the message; the next one has what it missed.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import triton_python_backend_utils as pb_utils

from minisgl_backend.errors import InvalidRequest, MiniSGLError, Overloaded, Recovering, Unsupported
from minisgl_backend.runtime.recorder import Refusal

logger = logging.getLogger(__name__)

_REASONS: Final[Mapping[type[MiniSGLError], Refusal]] = {
    Unsupported: "unsupported",
    InvalidRequest: "invalid",
    Recovering: "down",
    Overloaded: "queue_full",
}
"""The reason of the first class that an error is an instance of."""


def refusal_of(error: BaseException) -> Refusal | None:
    """For which reason an error refuses a request; None for what is no refusal."""
    found = (reason for kind, reason in _REASONS.items() if isinstance(error, kind))
    return next(found, None)


def engine_labels(model: str, version: str) -> dict[str, str]:
    """The labels of all metrics of one engine, or of one tokenizer; see ``engine_metrics``."""
    return {"model": Path(model).name, "version": version, "engine": secrets.token_hex(4)}


def refusals_family() -> Any:
    """The family of the metric that both engine and tokenizer report."""
    return pb_utils.MetricFamily(
        name="minisgl:requests_rejected_total",
        description="Requests refused at the door",
        kind=pb_utils.MetricFamily.COUNTER,
    )


@dataclass(slots=True)
class ReportedMetric:
    """A metric, and the value that Triton has of it."""

    metric: Any
    value: float = 0.0

    def raise_to(self, value: float) -> None:
        """Report the value of a counter."""
        if value > self.value:
            self.metric.increment(value - self.value)
            self.value = value

    def set(self, value: float) -> None:
        """Report the value of a gauge."""
        if value != self.value:
            self.metric.set(value)
            self.value = value


class Rejections:
    """Requests that the tokenizer refuses, reported in batches by a thread of its own."""

    def __init__(self, *, model: str, version: str, every_s: float = 0.5) -> None:
        self._family = refusals_family()
        labels = engine_labels(model, version)
        self._metrics = {
            reason: ReportedMetric(self._family.Metric(labels={**labels, "reason": reason}))
            for reason in _REASONS.values()
        }
        self._lock = threading.Lock()
        self._counts: Counter[Refusal] = Counter()
        self._every_s = every_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rejections", daemon=True)
        self._thread.start()

    def count(self, error: BaseException) -> None:
        """A request was refused with this error; what is no refusal is not counted."""
        if reason := refusal_of(error):
            with self._lock:
                self._counts[reason] += 1

    def close(self) -> None:
        """Report what is left, end the thread and drop the metrics."""
        self._closing.set()
        self._thread.join()
        self._metrics.clear()

    def _run(self) -> None:
        fails = is_last = False
        while not is_last:
            is_last = self._closing.wait(self._every_s)
            try:
                for reason, metric in self._metrics.items():
                    metric.raise_to(self._counts[reason])
                fails = False
            except Exception:
                if not fails:
                    logger.exception("the refusals cannot be reported")
                fails = True


class BucketCounts:
    """A histogram that is counted here: cumulative counts by upper bound, a sum and a count."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self._buckets = tuple(buckets)
        self._lock = threading.Lock()
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        with self._lock:
            self._counts[bisect.bisect_left(self._buckets, value)] += 1
            self._sum += value

    def totals(self) -> dict[str, float]:
        """Of all values so far: how many by the ``le`` of each bucket, their sum and count."""
        with self._lock:
            running, total = list(itertools.accumulate(self._counts)), self._sum
        bounds = (*(f"{bucket:g}" for bucket in self._buckets), "+Inf")
        by_bound = dict(zip(bounds, running, strict=True))
        return {**by_bound, "sum": total, "count": running[-1]}
