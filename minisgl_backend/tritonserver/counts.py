"""Counting in this process what Triton is told in bulk: histograms' buckets, and refusals."""

from __future__ import annotations

import bisect
import secrets
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import triton_python_backend_utils as pb_utils

from minisgl_backend.errors import InvalidRequest, MiniSGLError, Overloaded, Unsupported

REJECTED: Final = "minisgl:requests_rejected_total"
_REASONS: Final[Mapping[type[MiniSGLError], str]] = {
    Unsupported: "unsupported",
    InvalidRequest: "invalid",
    Overloaded: "queue_full",
}


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
            reason: self._family.Metric(labels={**labels, "reason": reason})
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
        for kind, reason in _REASONS.items():
            if isinstance(error, kind):
                with self._lock:
                    self._counts[reason] += 1

    def close(self) -> None:
        """Tell what is left, end the thread and drop the metrics."""
        self._closing.set()
        self._thread.join()
        self._metrics.clear()

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            self._report()
        self._report()

    def _report(self) -> None:
        with self._lock:
            counts, self._counts = self._counts, Counter()
        for reason, count in counts.items():
            self._metrics[reason].increment(count)


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

    def take(self) -> dict[str, float]:
        """What was added since the last call: by the ``le`` of a bucket, and as sum and count."""
        with self._lock:
            counts, self._counts = self._counts, [0] * len(self._counts)
            total, self._sum = self._sum, 0.0
        added: dict[str, float] = {}
        running = 0
        for bound, count in zip((*self._buckets, float("inf")), counts, strict=True):
            running += count
            added["+Inf" if bound == float("inf") else f"{bound:g}"] = running
        return added | {"sum": total, "count": running}
