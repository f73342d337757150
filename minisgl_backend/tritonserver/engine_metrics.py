"""The engine's counts as Prometheus metrics on Triton's own endpoint.

Each update of a metric is a round trip to tritonserver (some 60 microseconds) on the thread that
responses use too. So counts are gathered here and reported in batches, a few times a second, from a
thread of their own.

Each engine has a label of its own (``series``). It may take over the label of an engine that was
killed: then the counters go on, and the gauges are set again.

The gauges of load and pages come under two sets of names: vLLM's, and those of the TensorRT-LLM
backend. Routers read either: the endpoint picker of Kubernetes' Gateway API Inference Extension,
and Triton's own HTTP frontend for its load reports. Must not know requests: it reads what the
engine has counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import EngineFailure, InvalidRequest, Overloaded, Unsupported
from minisgl_backend.runtime.engine_base import EngineInfo, ReplicaStats
from minisgl_backend.runtime.recorder import REFUSALS, EngineStats, Observations
from minisgl_backend.tritonserver.adapter_gauge import AdapterGauge
from minisgl_backend.tritonserver.families import Families
from minisgl_backend.tritonserver.metrics import (
    BucketCounts,
    MetricsThread,
    ReportedMetric,
    engine_labels,
)
from minisgl_backend.tritonserver.refusals import refusal_counters
from minisgl_backend.tritonserver.series import SeriesLabel

_LATENCY_BUCKETS: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
_TOKEN_BUCKETS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_BATCH_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_FAILURES: Final = (EngineFailure, Overloaded, InvalidRequest, Unsupported)
"""The errors with which an accepted request may end; the last two are about its grammar or
adapter."""
_OF_REQUESTS: Final = {
    "time_to_first_token_s": ("vllm:time_to_first_token_seconds", _LATENCY_BUCKETS),
    "time_per_output_token_s": ("vllm:time_per_output_token_seconds", _LATENCY_BUCKETS),
    "e2e_latency_s": ("vllm:e2e_request_latency_seconds", _LATENCY_BUCKETS),
    "prompt_tokens": ("vllm:request_prompt_tokens", _TOKEN_BUCKETS),
    "generation_tokens": ("vllm:request_generation_tokens", _TOKEN_BUCKETS),
}
"""By field of ``Observations``: the histograms with one number per request, and their buckets."""
_COUNTERS: Final = {
    "vllm:prompt_tokens_total": "Prompt tokens of admitted requests",
    "vllm:generation_tokens_total": "Tokens generated",
    "vllm:prefix_cache_queries_total": "Prompt tokens looked up in the prefix cache",
    "vllm:prefix_cache_hits_total": "Prompt tokens found in the prefix cache",
    "vllm:spec_decode_num_drafts_total": "Times that guesses at a request's tokens were checked",
    "vllm:spec_decode_num_draft_tokens_total": "Tokens that were guessed",
    "vllm:spec_decode_num_accepted_tokens_total": "Guessed tokens that were right",
    "minisgl:host_cache_saved_tokens_total": "Tokens whose pages were copied to main memory",
    "minisgl:host_cache_loaded_tokens_total": "Tokens whose pages were copied from main memory",
    "minisgl:requests_cancelled_total": "Requests given up by their clients",
    "minisgl:requests_retracted_total": "Requests set back for want of pages",
}
_GAUGES: Final = {
    "vllm:num_requests_running": "Requests that hold a row",
    "vllm:num_requests_waiting": "Requests in the queue",
    "vllm:kv_cache_usage_perc": "Share of the pages that are neither free nor evictable",
}
_REPLICA_GAUGES: Final = {
    "up": "Whether the replica serves",
    "requests_running": "Requests that hold a row of the replica",
    "requests_waiting": "Requests in the queue of the replica",
    "kv_cache_usage": "Share of its pages that are neither free nor evictable",
}
_REPLICA_COUNTERS: Final = {
    "starts_total": "Processes of the replica that were started",
    "requests_total": "Requests that the replica was sent",
    "generation_tokens_total": "Tokens that the replica has generated",
    "prefix_queries_total": "Prompt tokens looked up in its prefix cache",
    "prefix_hits_total": "Prompt tokens found in its prefix cache",
}


class Engine(Protocol):
    """The part of the engine that is needed here."""

    info: EngineInfo

    def stats(self) -> EngineStats:
        """Counts at this moment."""

    def take_observations(self) -> Observations:
        """Observations since the last call."""

    def replicas(self) -> Sequence[ReplicaStats]:
        """Counts of each replica; none if there is one engine only."""


class EngineMetrics:
    """The metrics of one engine, and the thread that reports them. Any thread may call
    ``packet_sent``."""

    def __init__(
        self,
        engine: Engine,
        options: EngineOptions,
        *,
        version: str,
        directory: Path | None = None,
        every_s: float = 0.25,
    ) -> None:
        """``directory`` belongs to one tritonserver."""
        self._packet_tokens = BucketCounts(_TOKEN_BUCKETS)
        self._series = SeriesLabel(directory, f"{Path(options.model).name}.{version}")
        labels = engine_labels(options.model, version, self._series.value)
        self._thread = MetricsThread(
            lambda: ReportedEngine(engine, options, self._packet_tokens, labels), every_s=every_s
        )

    def packet_sent(self, num_tokens: int) -> None:
        """A response with ``num_tokens`` went out."""
        if num_tokens:
            self._packet_tokens.observe(num_tokens)

    def stop(self) -> bool:
        """Report what is left, and drop the metrics. Does not wait; returns whether it is done."""
        return self._thread.stop()

    def close(self) -> None:
        """Report what is left, and drop the metrics."""
        self._thread.close()
        self._series.release()


class ReportedEngine:
    """What Triton has of one engine. Belongs to one thread, from its creation to ``close``."""

    def __init__(
        self,
        engine: Engine,
        options: EngineOptions,
        packet_tokens: BucketCounts,
        labels: Mapping[str, str],
    ) -> None:
        self._engine = engine
        self._families = Families(labels)
        self._counters = self._families.counters(_COUNTERS)
        self._gauges = self._families.gauges(_GAUGES)
        self._requests, self._pages = self._make_load_gauges()
        self._host_pages, self._host_snapshots = (
            self._families.by_label(self._families.gauge(name, text), "state", ("used", "max"))
            for name, text in (
                ("minisgl:host_cache_pages", "Pages of main memory, by state"),
                ("minisgl:host_cache_snapshots", "Snapshots in main memory, by state"),
            )
        )
        self._cache_info: ReportedMetric | None = self._make_cache_info(options)
        self._adapters = (
            AdapterGauge(self._families, options.max_loras) if options.enable_lora else None
        )
        self._rejected = refusal_counters(self._families, REFUSALS)
        self._failed = self._families.by_label(
            self._families.counter(
                "minisgl:requests_failed_total", "Accepted requests that ended with an error"
            ),
            "code",
            [error.code for error in _FAILURES],
        )
        self._right_guesses = self._make_right_guesses(options.most_guessed)
        self._replicas = self._make_replicas()
        self._of_requests = {
            field: BucketCounts(buckets) for field, (_, buckets) in _OF_REQUESTS.items()
        }
        self._batch_size = BucketCounts(_BATCH_BUCKETS)
        self._step_s = {
            phase: BucketCounts(_LATENCY_BUCKETS) for phase in ("prefill", "decode", "mixed")
        }
        self._histograms = [
            *(
                self._families.histogram(_OF_REQUESTS[field][0], counts)
                for field, counts in self._of_requests.items()
            ),
            self._families.histogram("minisgl:chunk_tokens", packet_tokens),
            self._families.histogram("minisgl:batch_size", self._batch_size),
            *self._families.histograms("minisgl:step_seconds", "phase", self._step_s),
        ]

    def report(self) -> None:
        """Tell Triton what changed since the last report."""
        stats = self._engine.stats()
        scheduler = stats.scheduler
        for name, value in (
            ("vllm:prompt_tokens_total", stats.num_prompt_tokens),
            ("vllm:generation_tokens_total", stats.num_generated_tokens),
            ("vllm:prefix_cache_queries_total", scheduler.prefix_queries),
            ("vllm:prefix_cache_hits_total", scheduler.prefix_hits),
            ("vllm:spec_decode_num_drafts_total", scheduler.num_checks),
            ("vllm:spec_decode_num_draft_tokens_total", scheduler.num_guesses),
            ("vllm:spec_decode_num_accepted_tokens_total", scheduler.num_right_guesses),
            ("minisgl:host_cache_saved_tokens_total", scheduler.host_saved_tokens),
            ("minisgl:host_cache_loaded_tokens_total", scheduler.host_loaded_tokens),
            ("minisgl:requests_cancelled_total", stats.num_cancelled),
            ("minisgl:requests_retracted_total", scheduler.num_retractions),
        ):
            self._counters[name].raise_to(value)
        for reason, value in stats.rejected.items():
            self._rejected[reason].raise_to(value)
        for code, value in stats.failed.items():
            self._failed[code].raise_to(value)
        for place, value in enumerate(scheduler.num_right_by_place):
            self._right_guesses[place].raise_to(value)
        self._report_levels(stats)
        self._report_replicas()
        if self._adapters is not None:
            self._adapters.report(stats.running_adapters, stats.waiting_adapters)
        self._count_observations()
        for histogram in self._histograms:
            histogram.report()

    def close(self) -> None:
        """Drop all metrics, and then their families, as Triton demands."""
        self._counters.clear()
        self._gauges.clear()
        self._requests.clear()
        self._pages.clear()
        self._host_pages.clear()
        self._host_snapshots.clear()
        self._cache_info = None
        self._adapters = None
        self._rejected.clear()
        self._failed.clear()
        self._right_guesses.clear()
        self._replicas.clear()
        self._histograms.clear()
        self._families.close()

    def _report_levels(self, stats: EngineStats) -> None:
        scheduler, info = stats.scheduler, self._engine.info
        running, used = scheduler.num_running, scheduler.used_pages
        waiting = max(scheduler.num_waiting, stats.num_open - running)
        fraction = used / max(1, scheduler.total_pages)
        levels: tuple[tuple[Mapping[str, ReportedMetric], Mapping[str, float]], ...] = (
            (
                self._gauges,
                {
                    "vllm:num_requests_running": running,
                    "vllm:num_requests_waiting": waiting,
                    "vllm:kv_cache_usage_perc": fraction,
                },
            ),
            (
                self._requests,
                {
                    "waiting": waiting,
                    "scheduled": running,
                    "active": running,
                    "max": info.most_running,
                },
            ),
            (
                self._pages,
                {
                    "fraction": fraction,
                    "used": used,
                    "free": scheduler.total_pages - used,
                    "max": scheduler.total_pages,
                    "tokens_per": info.page_size,
                },
            ),
            (
                self._host_pages,
                {"used": scheduler.used_host_slots, "max": scheduler.host_slots},
            ),
            (
                self._host_snapshots,
                {"used": scheduler.used_state_slots, "max": scheduler.state_slots},
            ),
        )
        for metrics, values in levels:
            for name, value in values.items():
                metrics[name].set(value)

    def _report_replicas(self) -> None:
        for metrics, replica in zip(self._replicas, self._engine.replicas(), strict=True):
            scheduler = replica.stats.scheduler
            for name, level in (
                ("up", replica.is_up),
                ("requests_running", scheduler.num_running),
                ("requests_waiting", scheduler.num_waiting),
                ("kv_cache_usage", scheduler.used_pages / max(1, scheduler.total_pages)),
            ):
                metrics[name].set(level)
            for name, count in (
                ("starts_total", replica.num_starts),
                ("requests_total", replica.num_routed),
                ("generation_tokens_total", replica.stats.num_generated_tokens),
                ("prefix_queries_total", scheduler.prefix_queries),
                ("prefix_hits_total", scheduler.prefix_hits),
            ):
                metrics[name].raise_to(count)

    def _count_observations(self) -> None:
        observations = self._engine.take_observations()
        for field, counts in self._of_requests.items():
            for value in getattr(observations, field):
                counts.observe(value)
        for phase, seconds in observations.step_s:
            self._step_s[phase].observe(seconds)
        for size in observations.batch_size:
            self._batch_size.observe(size)

    # --- making metrics ----------------------------------------------------------------------

    def _make_load_gauges(self) -> tuple[dict[str, ReportedMetric], dict[str, ReportedMetric]]:
        """Requests and pages under the names of the TensorRT-LLM backend."""
        families = self._families
        requests = families.gauge("nv_trt_llm_request_metrics", "Requests, by their state")
        pages = families.gauge(
            "nv_trt_llm_kv_cache_block_metrics", "Pages of the KV cache, by their state"
        )
        return (
            families.by_label(requests, "request_type", ("waiting", "scheduled", "active", "max")),
            families.by_label(
                pages, "kv_cache_block_type", ("fraction", "used", "free", "max", "tokens_per")
            ),
        )

    def _make_cache_info(self, options: EngineOptions) -> ReportedMetric:
        """The fixed facts about the KV cache, as labels of a gauge that is always 1, as in vLLM."""
        info = self._engine.info
        labels = {
            "block_size": info.page_size,
            "num_gpu_blocks": info.num_pages * info.num_replicas,
            "kv_cache_size_tokens": info.num_pages * info.num_replicas * info.page_size,
            "cache_dtype": "auto" if options.kv_cache_dtype is None else "fp8_e4m3",
            "mamba_ssm_cache_dtype": options.state_dtype or "auto",
            "enable_prefix_caching": options.cache == "radix",
            "gpu_memory_utilization": options.memory_ratio,
        }
        metric = self._families.metric(
            self._families.gauge(
                "vllm:cache_config_info", "What is fixed about the KV cache, in its labels"
            ),
            {name: str(value) for name, value in labels.items()},
        )
        metric.set(1)
        return metric

    def _make_right_guesses(self, most_guessed: int) -> list[ReportedMetric]:
        """Right guesses by their place in a check. Like the other counters of guesses, that of the
        first place is there even if nothing is guessed."""
        family = self._families.counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "Guessed tokens that were right, by their place in a check",
        )
        places = [str(place) for place in range(max(1, most_guessed))]
        return list(self._families.by_label(family, "position", places).values())

    def _make_replicas(self) -> list[dict[str, ReportedMetric]]:
        """The metrics of each replica; all others are for the replicas together."""
        replicas = self._engine.replicas()
        if not replicas:
            return []
        families = {
            name: make(f"minisgl:replica_{name}", text)
            for make, descriptions in (
                (self._families.gauge, _REPLICA_GAUGES),
                (self._families.counter, _REPLICA_COUNTERS),
            )
            for name, text in descriptions.items()
        }
        return [
            {
                name: self._families.metric(family, {"replica": str(number)})
                for name, family in families.items()
            }
            for number in range(len(replicas))
        ]
