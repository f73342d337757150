"""Makes metrics inside Triton, all with the labels of one engine, and keeps their families.

Knows Triton's rules: a family outlives its metrics, and everything here belongs to one thread. Must
not know what the metrics mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import triton_python_backend_utils as pb_utils

from minisgl_backend.tritonserver.metrics import BucketCounts, ReportedMetric

L = TypeVar("L", bound=str)


class Families:
    """The families of one engine's metrics. Belongs to one thread, from its creation to ``close``.

    The metrics belong to the caller, who drops them before ``close``.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        """Every metric gets these ``labels``."""
        self._labels = dict(labels)
        self._kept: list[Any] = []

    def counter(self, name: str, description: str) -> Any:
        """A family of counters, for ``metric`` and ``by_label``."""
        return self._make(name, description, pb_utils.MetricFamily.COUNTER)

    def gauge(self, name: str, description: str) -> Any:
        """A family of gauges, for ``metric`` and ``by_label``."""
        return self._make(name, description, pb_utils.MetricFamily.GAUGE)

    def metric(self, family: Any, labels: Mapping[str, str] | None = None) -> ReportedMetric:
        """A metric of the family, with these labels added."""
        return ReportedMetric(family.Metric(labels={**self._labels, **(labels or {})}))

    def by_label(self, family: Any, label: str, values: Sequence[L]) -> dict[L, ReportedMetric]:
        """A metric of the family for each value of a label."""
        return {value: self.metric(family, {label: value}) for value in values}

    def counters(self, descriptions: Mapping[str, str]) -> dict[str, ReportedMetric]:
        """One counter of each name."""
        return {name: self.metric(self.counter(name, text)) for name, text in descriptions.items()}

    def gauges(self, descriptions: Mapping[str, str]) -> dict[str, ReportedMetric]:
        """One gauge of each name."""
        return {name: self.metric(self.gauge(name, text)) for name, text in descriptions.items()}

    def histogram(self, name: str, counts: BucketCounts) -> Histogram:
        """A histogram of the observations in ``counts``."""
        return Histogram(self, self._histogram_families(name), counts, {})

    def histograms(
        self, name: str, label: str, counts: Mapping[str, BucketCounts]
    ) -> list[Histogram]:
        """A histogram for each value of a label."""
        families = self._histogram_families(name)
        return [Histogram(self, families, each, {label: value}) for value, each in counts.items()]

    def close(self) -> None:
        """Drop the families."""
        self._kept.clear()

    def _make(self, name: str, description: str, kind: Any) -> Any:
        family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
        self._kept.append(family)
        return family

    def _histogram_families(self, name: str) -> dict[str, Any]:
        return {
            suffix: self.counter(f"{name}_{suffix}", f"Histogram {name}")
            for suffix in ("bucket", "sum", "count")
        }


class Histogram:
    """Observations that are counted here, reported as the counters that Prometheus reads.

    Each observation of one of Triton's own histograms would be a round trip.
    """

    def __init__(
        self,
        families: Families,
        by_suffix: Mapping[str, Any],
        counts: BucketCounts,
        labels: Mapping[str, str],
    ) -> None:
        self._counts = counts
        self._metrics = {
            suffix: families.metric(by_suffix[suffix], labels) for suffix in ("sum", "count")
        }
        for bound in counts.bounds:
            self._metrics[bound] = families.metric(by_suffix["bucket"], {**labels, "le": bound})

    def report(self) -> None:
        """Tell Triton what was observed since the last report."""
        for name, total in self._counts.totals().items():
            self._metrics[name].raise_to(total)
