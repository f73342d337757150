"""What the engine of a server under test reports about cancelled requests."""

from __future__ import annotations

from minisgl_backend.server.process import TritonServer
from tests.server.client import Metrics, wait_for


class Engine:
    """What the metrics say since the last look."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        wait_for(self._is_idle, "an idle engine")
        self._cancelled = self._count()
        self._finished = self._count_finished()

    def check_cancelled(self, expected: int = 1) -> None:
        """``expected`` more requests are cancelled, and none is left."""
        wait_for(lambda: self._count() >= self._cancelled + expected, "the cancelled requests")
        wait_for(self._is_idle, "an idle engine")
        assert self._count() == self._cancelled + expected

    def check_finished(self, expected: int) -> None:
        """``expected`` more requests have ended, and none was cancelled."""
        wait_for(lambda: self._count_finished() >= self._finished + expected, "their ends")
        assert self._count() == self._cancelled

    def _count_finished(self) -> float:
        return Metrics(self._server)["vllm:e2e_request_latency_seconds_count"]

    def _count(self) -> float:
        return Metrics(self._server)["minisgl:requests_cancelled_total"]

    def _is_idle(self) -> bool:
        metrics = Metrics(self._server)
        return (
            metrics["vllm:num_requests_running"] == 0
            and metrics["vllm:num_requests_waiting"] == 0
            and metrics["vllm:kv_cache_usage_perc"] == 0
        )
