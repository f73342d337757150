"""Requests refused on arrival: why, and the metric of them that both engine and tokenizer report.

Must not know what is wrong with a request.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from minisgl_backend.errors import InvalidRequest, MiniSGLError, Overloaded, Recovering, Unsupported
from minisgl_backend.runtime.recorder import Refusal
from minisgl_backend.tritonserver.families import Families
from minisgl_backend.tritonserver.metrics import MetricsThread, ReportedMetric, engine_labels

_REASONS: Final[Mapping[type[MiniSGLError], Refusal]] = {
    Unsupported: "unsupported",
    InvalidRequest: "invalid",
    Recovering: "down",
    Overloaded: "queue_full",
}
"""The reason of the first class that an error is an instance of."""


def refusal_of(error: BaseException) -> Refusal | None:
    """Why an error refuses a request; None if the error is not a refusal."""
    found = (reason for kind, reason in _REASONS.items() if isinstance(error, kind))
    return next(found, None)


def refusal_counters(
    families: Families, reasons: Sequence[Refusal]
) -> dict[Refusal, ReportedMetric]:
    """A counter for each reason."""
    family = families.counter("minisgl:requests_rejected_total", "Requests refused on arrival")
    return families.by_label(family, "reason", reasons)


class Refusals:
    """Requests that the tokenizer refuses. Any thread may call ``count``."""

    def __init__(self, *, model: str, version: str, every_s: float = 0.5) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Refusal] = Counter()
        labels = engine_labels(model, version, secrets.token_hex(4))
        self._thread = MetricsThread(
            lambda: _ReportedRefusals(self._counts, labels),
            every_s=every_s,
        )

    def count(self, error: BaseException) -> None:
        """Count a request that was refused with this error; other errors are not counted."""
        if reason := refusal_of(error):
            with self._lock:
                self._counts[reason] += 1

    def close(self) -> None:
        """Report what is left, and drop the metrics."""
        self._thread.close()


class _ReportedRefusals:
    def __init__(self, counts: Counter[Refusal], labels: Mapping[str, str]) -> None:
        self._counts = counts
        self._families = Families(labels)
        self._metrics = refusal_counters(self._families, list(_REASONS.values()))

    def report(self) -> None:
        for reason, metric in self._metrics.items():
            metric.raise_to(self._counts[reason])

    def close(self) -> None:
        self._metrics.clear()
        self._families.close()
