"""The dashboard and the alert rules ask for metrics that a running server has."""

from __future__ import annotations

import importlib
import itertools
import json
import re
from typing import Any, Final

import pytest
import yaml

from minisgl_backend.server.process import TritonServer
from tests.docker.conftest import DOCKER, metrics_of
from tests.docker.promql import ADDED, filled_in, missing, selectors, series
from tests.server.client import Metrics, wait_for

pytestmark = pytest.mark.server

DASHBOARD: Final = json.loads((DOCKER / "grafana/dashboards/minisgl.json").read_text("utf-8"))
PANELS: Final = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES: Final = [
    rule
    for group in yaml.safe_load((DOCKER / "prometheus/alerts.yml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
GPU_METRICS: Final = frozenset(
    {
        "nv_gpu_utilization",
        "nv_gpu_memory_used_bytes",
        "nv_gpu_memory_total_bytes",
        "nv_gpu_power_usage",
    }
)
"""Triton's own metrics, which it has if there is an NVIDIA GPU."""

WANTED: Final = {
    "Requests": "vllm:num_requests_running",
    "Tokens a second": "vllm:generation_tokens_total",
    "Time to first token": "vllm:time_to_first_token_seconds_bucket",
    "Time per output token": "vllm:time_per_output_token_seconds_bucket",
    "End to end": "vllm:e2e_request_latency_seconds_bucket",
    "Step": "minisgl:step_seconds_bucket",
    "Batch": "minisgl:batch_size_bucket",
    "Chunk": "minisgl:chunk_tokens_bucket",
    "Right guesses by place": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "Prefix cache": "vllm:prefix_cache_hits_total",
    "Main memory": "minisgl:host_cache_loaded_tokens_total",
    "KV usage": "vllm:kv_cache_usage_perc",
    "Refused": "minisgl:requests_rejected_total",
    "Failed": "minisgl:requests_failed_total",
    "GPU utilization": "nv_gpu_utilization",
    "Gateway: answers": "minisgl_gateway_requests_total",
}
"""Panels that an operator looks for, and the metrics behind them."""


def expressions(panel: dict[str, Any]) -> list[str]:
    return [filled_in(target["expr"]) for target in panel["targets"]]


@pytest.fixture(scope="module")
def page(server: TritonServer, gateway: str) -> dict[str, list[dict[str, str]]]:
    """The metrics of a server and a gateway that have answered a request."""
    wait_for(lambda: Metrics(server)["vllm:e2e_request_latency_seconds_count"] > 0, "metrics")
    return series(Metrics(server).text + metrics_of(gateway))


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_panels_ask_for_metrics_that_exist(
    panel: dict[str, Any], page: dict[str, list[dict[str, str]]]
) -> None:
    wanted = [selector for text in expressions(panel) for selector in selectors(text)]
    assert wanted
    on_cpu = [selector for selector in wanted if selector.metric not in GPU_METRICS]
    assert [lack for selector in on_cpu for lack in missing(selector, page)] == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alerts_ask_for_metrics_that_exist(
    rule: dict[str, Any], page: dict[str, list[dict[str, str]]]
) -> None:
    wanted = [selector for selector in selectors(rule["expr"]) if selector.metric != "up"]
    assert [lack for selector in wanted for lack in missing(selector, page)] == []


def test_every_metric_of_the_engine_has_a_panel(page: dict[str, list[dict[str, str]]]) -> None:
    def family(metric: str) -> str:
        return re.sub("_(bucket|sum|count)$", "", metric)

    shown = {
        family(selector.metric)
        for panel in PANELS
        for text in expressions(panel)
        for selector in selectors(text)
    }
    ours = {family(metric) for metric in page if metric.startswith(("minisgl", "vllm:"))}
    python_clients = {metric for metric in ours if metric.endswith("_created")}
    assert ours - python_clients - shown == set()


def test_missing_metrics_and_labels_would_be_found(page: dict[str, list[dict[str, str]]]) -> None:
    def lacks(expression: str) -> list[str]:
        return [lack for selector in selectors(expression) for lack in missing(selector, page)]

    assert lacks("rate(vllm:no_such_metric[1m])") == ["no metric vllm:no_such_metric"]
    assert lacks("sum by (phases) (minisgl:step_seconds_count)") == [
        "minisgl:step_seconds_count has no label phases"
    ]
    assert lacks('minisgl:requests_rejected_total{reason=~"queue_full|tired"}') == [
        "minisgl:requests_rejected_total has no series with reason =~ tired"
    ]


def test_legends_name_labels_that_the_expressions_keep() -> None:
    kept = ADDED | {"gpu_uuid", "model", "version"}
    for panel in PANELS:
        for target in panel["targets"]:
            grouped = {
                label
                for selector in selectors(filled_in(target["expr"]))
                for label in selector.grouped_by
            }
            named = {part.split("}}")[0] for part in target["legendFormat"].split("{{")[1:]}
            assert named <= grouped | kept, f"{panel['title']}: {target['legendFormat']}"


def test_the_dashboard_shows_what_operators_look_for() -> None:
    shown = {
        panel["title"]: {s.metric for text in expressions(panel) for s in selectors(text)}
        for panel in PANELS
    }
    assert {
        title for title, metric in WANTED.items() if metric not in shown.get(title, ())
    } == set()


def test_panels_have_ids_and_places_of_their_own() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for one, other in itertools.combinations(DASHBOARD["panels"], 2):
        a, b = one["gridPos"], other["gridPos"]
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or above, f"{one['title']} covers {other['title']}"
        assert a["x"] + a["w"] <= 24


def test_grafana_knows_every_field() -> None:
    """Read and written with Grafana's own types, the dashboard loses nothing."""
    pytest.importorskip("grafana_foundation_sdk", reason="Grafana's types need Python 3.11")
    encoder = importlib.import_module("grafana_foundation_sdk.cog.encoder")
    plugins = importlib.import_module("grafana_foundation_sdk.cog.plugins")
    types = importlib.import_module("grafana_foundation_sdk.models.dashboard")
    plugins.register_default_plugins()

    def understood(dashboard: dict[str, Any]) -> Any:
        return json.loads(encoder.JSONEncoder().encode(types.Dashboard.from_json(dashboard)))

    assert lost(DASHBOARD, understood(DASHBOARD)) == []
    misspelt = {**DASHBOARD, "refesh": "5s"}
    assert lost(misspelt, understood(misspelt)) == ["/refesh"]


def lost(wanted: Any, got: Any, place: str = "") -> list[str]:
    """Where ``got`` lacks something in ``wanted``; whatever it has in addition is a default."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        return [
            text
            for key, value in wanted.items()
            for text in lost(value, got.get(key), f"{place}/{key}")
        ]
    if isinstance(wanted, list) and isinstance(got, list) and len(wanted) == len(got):
        pairs = enumerate(zip(wanted, got, strict=True))
        return [text for i, (a, b) in pairs for text in lost(a, b, f"{place}/{i}")]
    return [] if wanted == got else [place]


def test_every_panel_uses_the_dashboards_data_source() -> None:
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in PANELS)
    assert all(panel["description"].strip() for panel in PANELS)


def test_grafana_finds_the_data_source_and_the_dashboard() -> None:
    provisioning = DOCKER / "grafana/provisioning"
    sources = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text("utf-8"))
    providers = yaml.safe_load((provisioning / "dashboards/minisgl.yaml").read_text("utf-8"))
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text("utf-8"))
    mounts = {
        volume.split(":")[1]: volume.split(":")[0]
        for volume in compose["services"]["grafana"]["volumes"]
    }
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"
    assert "prometheus" in compose["services"]
    assert mounts[providers["providers"][0]["options"]["path"]] == "./grafana/dashboards"
    assert mounts["/etc/grafana/provisioning"] == "./grafana/provisioning"
