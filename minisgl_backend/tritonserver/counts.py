"""Counting in this process what Triton is told in bulk: histograms' buckets, and refusals.

To tell it may fail, where Triton has no room for the message; what was not told is told next time.
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

logger = logging.getLogger(__name__)

REJECTED: Final = "minisgl:requests_rejected_total"
_REASONS: Final[Mapping[type[MiniSGLError], str]] = {
    Unsupported: "unsupported",
    InvalidRequest: "invalid",
    Recovering: "down",
    Overloaded: "queue_full",
}
"""The first that an error is an instance of counts."""


@dataclass(slots=True)
class Told:
    """A metric, and the value that Triton has of it."""

    metric: Any
    value: float = 0.0

    def raise_to(self, value: float) -> None:
        """Tell the value of a counter."""
        if value > self.value:
            self.metric.increment(value - self.value)
            self.value = value

    def set(self, value: float) -> None:
        """Tell the value of a gauge."""
        if value != self.value:
            self.metric.set(value)
            self.value = value


class Rejections:
    """Requests that the tokenizer refuses, told in bulk by a thread of its own."""

    def __init__(self, *, model: str, version: str, every_s: float = 0.5) -> None:
        self._family = pb_utils.MetricFamily(
            name=REJECTED,
            description="Requests refused at the door",
            kind=pb_utils.MetricFamily.COUNTER,
        )
        labels = {"model": Path(model).name, "version": version, "engine": secrets.token_hex(4)}
        self._metrics = {
            reason: Told(self._family.Metric(labels={**labels, "reason": reason}))
            for reason in _REASONS.values()
        }
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._every_s = every_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rejections", daemon=True)
        self._thread.start()

    def count(self, error: BaseException) -> None:
        """A request was refused with this error; what is no refusal is not counted."""
        found = (reason for kind, reason in _REASONS.items() if isinstance(error, kind))
        if reason := next(found, None):
            with self._lock:
                self._counts[reason] += 1

    def close(self) -> None:
        """Tell what is left, end the thread and drop the metrics."""
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
                    logger.exception("the refusals cannot be told")
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
