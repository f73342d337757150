"""What the gateway counts, in Prometheus' text format; each gateway has its own registry.

Must not know when something is counted, or what a request asks for.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Telemetry:
    """The metrics; routes are paths of the API, or ``other`` for requests that reached none."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "minisgl_gateway_requests",
            "Requests answered, by HTTP status; 499 is one that was given up or cancelled.",
            ("route", "status"),
            registry=self._registry,
        )
        self.open_requests = Gauge(
            "minisgl_gateway_open_requests", "Requests under way.", registry=self._registry
        )
        self.open_streams = Gauge(
            "minisgl_gateway_open_streams", "Streams under way.", registry=self._registry
        )
        self.slow_readers = Counter(
            "minisgl_gateway_slow_readers",
            "Connections cut because the client did not read the answer.",
            registry=self._registry,
        )
        self.request_seconds = Histogram(
            "minisgl_gateway_request_seconds",
            "Time from a request's head to the end of its answer.",
            ("route",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.first_event_seconds = Histogram(
            "minisgl_gateway_first_event_seconds",
            "Time from a stream's request to its first event.",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def text(self) -> bytes:
        """The current values."""
        return generate_latest(self._registry)
