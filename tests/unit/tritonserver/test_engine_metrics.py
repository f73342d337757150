"""Metrics: their names and labels; counts are reported once, and from a single thread."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import (
    Cancelled,
    EngineFailure,
    InvalidRequest,
    MiniSGLError,
    Overloaded,
    Recovering,
    Unsupported,
)
from minisgl_backend.runtime.engine_base import ReplicaStats
from minisgl_backend.runtime.recorder import EngineStats, Observations, Recorder
from minisgl_backend.scheduling.report import SchedulerStats
from minisgl_backend.tritonserver.engine_metrics import EngineMetrics
from minisgl_backend.tritonserver.metrics import BucketCounts, MetricsThread
from minisgl_backend.tritonserver.refusals import Refusals
from tests.fakes.engine_info import engine_info
from tests.fakes.pb_utils import Metric, MetricFamily

OPTIONS = EngineOptions(model="/models/demo", kv_cache_dtype="fp8", cache="naive")
INFO = engine_info(model="/models/demo", max_running_requests=8, max_queued_requests=8)


class Engine:
    """As much of an engine as metrics look at."""

    info = INFO

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.scheduler = SchedulerStats(
            num_waiting=1,
            num_running=2,
            total_pages=50,
            free_pages=20,
            cached_pages=10,
            evictable_pages=5,
            num_retractions=3,
            prefix_queries=100,
            prefix_hits=40,
            host_saved_tokens=320,
            host_loaded_tokens=16,
            host_slots=30,
            used_host_slots=20,
            state_slots=7,
            used_state_slots=4,
        )

        self.num_readings = 0

    def stats(self) -> EngineStats:
        self.num_readings += 1
        return self.recorder.snapshot(self.scheduler, 3)

    def take_observations(self) -> Observations:
        return self.recorder.take_observations()

    def replicas(self) -> list[ReplicaStats]:
        return []


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def metrics(engine: Engine) -> Iterator[EngineMetrics]:
    MetricFamily.families.clear()
    metrics = EngineMetrics(engine, OPTIONS, version="1", every_s=0.001)
    yield metrics
    metrics.close()


def reports(metrics: EngineMetrics, engine: Engine) -> None:
    """Wait until everything counted so far has been reported."""
    seen = engine.num_readings
    limit = time.monotonic() + 20
    while engine.num_readings < seen + 3:  # one may be under way, so the next may be the first
        assert time.monotonic() < limit
        time.sleep(0.001)


def by_label(family: str, label: str) -> dict[str, float]:
    """The values of a family's metrics."""
    metrics = MetricFamily.families[family].metrics
    return {dict(key)[label]: metric.current for key, metric in metrics.items()}


def metric(name: str, **labels: str) -> Metric:
    """The metric of a family that has these labels."""
    (found,) = (
        metric
        for key, metric in MetricFamily.families[name].metrics.items()
        if labels.items() <= dict(key).items()
    )
    return found


def test_every_metric_is_documented(metrics: EngineMetrics, engine: Engine) -> None:
    """A dozen of them stood in no document."""
    reports(metrics, engine)
    page = Path(__file__).parents[3].joinpath("docs", "deploying.md").read_text("utf-8")
    names = {re.sub("_(bucket|sum|count)$", "", name) for name in MetricFamily.families}
    assert "minisgl:step_seconds" in names
    assert {name for name in names if not re.search(rf"`{name}[`{{]", page)} == set()


def test_counts_are_told_once(metrics: EngineMetrics, engine: Engine) -> None:
    recorder = engine.recorder
    recorder.request_admitted(7)
    recorder.request_started(0.05)
    recorder.request_finished(num_tokens=3, e2e_s=0.2, decode_s=0.1)
    recorder.request_refused("queue_full")
    recorder.request_failed("INTERNAL")
    recorder.request_cancelled()
    recorder.step_committed("decode", batch_size=3, num_tokens=3, duration_s=0.004)
    metrics.packet_sent(5)
    metrics.packet_sent(0)  # a probe
    reports(metrics, engine)
    assert metric("vllm:prompt_tokens_total").current == 7
    assert metric("vllm:generation_tokens_total").current == 3
    assert metric("vllm:prefix_cache_queries_total").current == 100
    assert metric("vllm:prefix_cache_hits_total").current == 40
    assert metric("minisgl:host_cache_saved_tokens_total").current == 320
    assert metric("minisgl:host_cache_loaded_tokens_total").current == 16
    assert by_label("minisgl:host_cache_pages", "state") == {"used": 20, "max": 30}
    assert by_label("minisgl:host_cache_snapshots", "state") == {"used": 4, "max": 7}
    assert metric("minisgl:requests_cancelled_total").current == 1
    assert metric("minisgl:requests_retracted_total").current == 3
    assert metric("minisgl:requests_rejected_total", reason="queue_full").current == 1
    assert metric("minisgl:requests_failed_total", code="INTERNAL").current == 1
    assert metric("vllm:num_requests_running").current == 2
    assert metric("vllm:num_requests_waiting").current == 1
    assert metric("vllm:kv_cache_usage_perc").current == 0.5
    for name, value, below, above in (
        ("vllm:time_to_first_token_seconds", 0.05, "0.02", "0.05"),
        ("vllm:time_per_output_token_seconds", 0.05, "0.02", "0.05"),
        ("vllm:e2e_request_latency_seconds", 0.2, "0.1", "0.2"),
        ("vllm:request_prompt_tokens", 7, "4", "16"),
        ("vllm:request_generation_tokens", 3, "1", "4"),
    ):
        assert metric(f"{name}_sum").current == value
        assert metric(f"{name}_count").current == 1
        assert metric(f"{name}_bucket", le=below).current == 0
        assert metric(f"{name}_bucket", le=above).current == 1
    assert metric("minisgl:chunk_tokens_count").current == 1
    assert metric("minisgl:chunk_tokens_sum").current == 5
    assert metric("minisgl:chunk_tokens_bucket", le="4").current == 0
    assert metric("minisgl:chunk_tokens_bucket", le="16").current == 1
    assert metric("minisgl:chunk_tokens_bucket", le="+Inf").current == 1
    assert metric("minisgl:step_seconds_bucket", phase="decode", le="0.005").current == 1
    assert metric("minisgl:step_seconds_count", phase="prefill").current == 0
    assert metric("minisgl:batch_size_sum").current == 3
    recorder.request_cancelled()
    reports(metrics, engine)
    assert metric("minisgl:requests_cancelled_total").current == 2


PER_PLACE = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@pytest.mark.parametrize("option", ["speculative_tokens", "speculative_mtp_tokens"])
def test_right_guesses_are_told_by_place(option: str, engine: Engine) -> None:
    MetricFamily.families.clear()
    options = EngineOptions.from_mapping({"model": "/models/demo", option: 3})
    metrics = EngineMetrics(engine, options, version="1", every_s=0.001)
    try:
        for by_right, expected in (
            ((9, 4, 1, 2), {"0": 7, "1": 3, "2": 2}),
            ((9, 5, 2, 3), {"0": 10, "1": 5, "2": 3}),
        ):
            engine.scheduler = replace(engine.scheduler, num_checks_by_right=by_right)
            reports(metrics, engine)
            assert by_label(PER_PLACE, "position") == expected
    finally:
        metrics.close()


def test_an_engine_that_guesses_nothing_tells_that_of_the_first_place(
    metrics: EngineMetrics, engine: Engine
) -> None:
    engine.scheduler = replace(engine.scheduler, num_checks_by_right=(0,))
    reports(metrics, engine)
    assert by_label(PER_PLACE, "position") == {"0": 0}


@pytest.mark.parametrize("error", [EngineFailure, Overloaded, InvalidRequest, Unsupported])
def test_requests_that_fail_are_counted_whatever_their_error(
    error: type[MiniSGLError], metrics: EngineMetrics, engine: Engine
) -> None:
    """Such as a grammar that turns out to be unsupported. Later reports still arrive."""
    engine.recorder.request_failed(error.code)
    engine.recorder.step_committed("decode", batch_size=3, num_tokens=3, duration_s=0.004)
    reports(metrics, engine)
    assert metric("minisgl:requests_failed_total", code=error.code).current == 1
    assert metric("minisgl:batch_size_sum").current == 3


def test_load_under_the_names_that_routers_read(metrics: EngineMetrics, engine: Engine) -> None:
    reports(metrics, engine)
    assert by_label("nv_trt_llm_request_metrics", "request_type") == {
        "waiting": 1,
        "scheduled": 2,
        "active": 2,
        "max": 8,
    }
    assert by_label("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type") == {
        "fraction": 0.5,
        "used": 25,
        "free": 25,
        "max": 50,
        "tokens_per": 16,
    }
    ((key, info),) = MetricFamily.families["vllm:cache_config_info"].metrics.items()
    assert info.current == 1
    labels = dict(key)
    assert labels.pop("engine")
    assert labels == {
        "model": "demo",
        "version": "1",
        "block_size": "16",
        "num_gpu_blocks": "50",
        "kv_cache_size_tokens": "800",
        "cache_dtype": "fp8_e4m3",
        "mamba_ssm_cache_dtype": "auto",
        "enable_prefix_caching": "False",
        "gpu_memory_utilization": "0.9",
    }


def test_every_metric_names_the_model_and_its_engine(
    metrics: EngineMetrics, engine: Engine
) -> None:
    """Two engines of one model never share a metric: Triton would crash when one of them ends."""
    first = {name: set(family.metrics) for name, family in MetricFamily.families.items()}
    other = EngineMetrics(engine, OPTIONS, version="1")
    for name, family in MetricFamily.families.items():
        assert not first[name] & set(family.metrics)
        for key in family.metrics:
            labels = dict(key)
            assert labels["model"] == "demo" and labels["version"] == "1"
    other.close()


class Told:
    """Metrics that record which thread calls them."""

    def __init__(self) -> None:
        self.threads = [threading.current_thread()]
        self.calls: list[str] = []

    def report(self) -> None:
        self._note("report")

    def close(self) -> None:
        self._note("close")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.append(threading.current_thread())


def test_metrics_live_on_one_thread_from_first_to_last() -> None:
    made: list[Told] = []

    def make() -> Told:
        made.append(Told())
        return made[0]

    thread = MetricsThread(make, every_s=1000)
    thread.close()
    (told,) = made
    assert told.calls == ["report", "report", "close"]
    assert len(set(told.threads)) == 1
    assert threading.current_thread() not in told.threads


def test_metrics_that_cannot_be_made_fail_the_load() -> None:
    def make() -> Told:
        raise RuntimeError("no room in shared memory")

    with pytest.raises(RuntimeError, match="no room"):
        MetricsThread(make, every_s=1000)


@pytest.fixture
def refusals() -> Iterator[Callable[[], dict[str, float]]]:
    """The refusals that Triton was told about, by reason."""
    MetricFamily.families.clear()

    def told() -> dict[str, float]:
        metrics = MetricFamily.families["minisgl:requests_rejected_total"].metrics
        return {dict(key)["reason"]: metric.current for key, metric in metrics.items()}

    yield told


def test_refusals_of_the_tokenizer(refusals: Callable[[], dict[str, float]]) -> None:
    rejections = Refusals(model="/models/demo", version="1", every_s=1000)
    for error in (
        InvalidRequest("a"),
        InvalidRequest("b"),
        Unsupported("c"),
        Cancelled("d"),
        Overloaded("e"),
        Recovering("f"),
    ):
        rejections.count(error)
    rejections.close()
    assert refusals() == {"invalid": 2, "unsupported": 1, "down": 1, "queue_full": 1}


def test_counts_that_could_not_be_reported_are_reported_later(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refusals: Callable[[], dict[str, float]],
) -> None:
    def increment(_: Metric, value: float) -> None:
        raise RuntimeError("no room in shared memory")

    rejections = Refusals(model="/models/demo", version="1", every_s=0.001)
    with monkeypatch.context() as patch:
        patch.setattr(Metric, "increment", increment)
        rejections.count(InvalidRequest("a"))
        limit = time.monotonic() + 20
        while "cannot be reported" not in caplog.text:
            assert time.monotonic() < limit
    rejections.close()
    assert refusals()["invalid"] == 1


BUCKETS = (1.0, 2.0, 5.0)


@given(st.lists(st.floats(0, 10)))
def test_bucket_counts_are_cumulative(values: list[float]) -> None:
    counts = BucketCounts(BUCKETS)
    for value in values:
        counts.observe(value)
    totals = counts.totals()
    for bound in BUCKETS:
        assert totals[f"{bound:g}"] == sum(value <= bound for value in values)
    assert totals["+Inf"] == totals["count"] == len(values)
    assert totals["sum"] == pytest.approx(sum(values))
