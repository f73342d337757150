"""A real Prometheus accepts the configuration, the rules, and every dashboard expression."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from minisgl_backend.server.process import TritonServer
from tests.docker.conftest import DOCKER, ask_gateway, tool
from tests.docker.manifests import one
from tests.docker.promql import filled_in
from tests.docker.test_dashboard import PANELS, RULES
from tests.server.client import PATIENCE_S, wait_for

pytestmark = pytest.mark.server

POD = "minisgl-replicas-7d9f8-x2x4q"


def scaling_queries() -> list[str]:
    """What the autoscalers of the Kubernetes manifests ask, as for one of their pods."""
    triggers = one("autoscaling", "ScaledObject")["spec"]["triggers"]
    metrics = one("kserve", "InferenceService")["spec"]["predictor"]["autoScaling"]["metrics"]
    queries = [trigger["metadata"]["query"] for trigger in triggers]
    queries += [metric["external"]["metric"]["query"] for metric in metrics]
    return [query.replace("minisgl-predictor", "minisgl-replicas") for query in queries]


def test_promtool_accepts_the_configuration() -> None:
    prometheus = DOCKER / "prometheus"
    for check in (
        ["check", "config", "--syntax-only", str(prometheus / "prometheus.yml")],
        ["check", "rules", str(prometheus / "alerts.yml")],
    ):
        done = subprocess.run([tool("promtool"), *check], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_alerts_fire_when_they_should() -> None:
    check = [tool("promtool"), "test", "rules", str(Path(__file__).parent / "alerts_test.yml")]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_right_guesses_are_shown_as_shares_of_all_checks(tmp_path: Path) -> None:
    """Of two engines together. The server of the other tests guesses nothing."""
    (panel,) = (panel for panel in PANELS if panel["title"] == "Right guesses by place")
    (target,) = panel["targets"]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    counts = {
        'vllm:spec_decode_num_drafts_total{engine="a"}': 6,
        'vllm:spec_decode_num_drafts_total{engine="b"}': 2,
        f'{name}{{engine="a",position="0"}}': 3,
        f'{name}{{engine="b",position="0"}}': 1,
        f'{name}{{engine="a",position="1"}}': 2,
        f'{name}{{engine="b",position="1"}}': 0,
    }
    shares = {"0": 0.5, "1": 0.25}
    test = {
        "interval": "15s",
        "input_series": [{"series": of, "values": f"0+{n}x20"} for of, n in counts.items()],
        "promql_expr_test": [
            {
                "expr": filled_in(target["expr"]),
                "eval_time": "5m",
                "exp_samples": [
                    {"labels": f'{{position="{place}"}}', "value": share}
                    for place, share in shares.items()
                ],
            }
        ],
    }
    rules = tmp_path / "test.yml"
    rules.write_text(yaml.safe_dump({"tests": [test]}))
    check = [tool("promtool"), "test", "rules", str(rules)]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested() -> None:
    text = (Path(__file__).parent / "alerts_test.yml").read_text("utf-8")
    assert [rule["alert"] for rule in RULES if rule["alert"] not in text] == []


class Prometheus:
    """A Prometheus that scrapes one server, with docker/'s configuration except the address."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ready(self) -> bool:
        """Whether it answers queries."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def query(self, expression: str) -> list[float]:
        """The values of an instant query; raises ``HTTPError`` if it is invalid."""
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(
            f"{self.url}/api/v1/query?{query}", timeout=PATIENCE_S
        ) as response:
            result: list[dict[str, Any]] = json.load(response)["data"]["result"]
        return [float(sample["value"][1]) for sample in result]


@pytest.fixture(scope="module")
def prometheus(
    server: TritonServer, gateway: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    binary = tool("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((DOCKER / "prometheus/prometheus.yml").read_text("utf-8"))
    config["global"].update(scrape_interval="500ms", scrape_timeout="500ms")
    config["rule_files"] = [str(DOCKER / "prometheus" / name) for name in config["rule_files"]]
    targets = {
        "minisgl": f"127.0.0.1:{server.metrics_port}",
        "gateway": gateway.removeprefix("http://"),
    }
    for job in config["scrape_configs"]:
        # in a cluster every series has the name of its pod
        found = {"targets": [targets.pop(job["job_name"])], "labels": {"pod": POD}}
        job["static_configs"] = [found]
        job.pop("authorization", None)  # a gateway on the loopback address asks for no key
    assert not targets
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as held, (folder / "log").open("w") as log:
        # it stays bound, so that no other process gets it; Go's listeners set the same option
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        process = subprocess.Popen(
            [
                binary,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            prometheus = Prometheus(f"http://{address}")
            wait_for(prometheus.ready, "Prometheus")
            yield prometheus
        finally:
            process.terminate()
            process.wait()


def test_every_panel_shows_numbers(gateway: str, prometheus: Prometheus) -> None:
    """Except GPU metrics, which the server here does not have, and shares of guesses, since it
    makes none."""
    wanted = {
        filled_in(target["expr"]).replace("[1m]", "[10s]")
        for panel in PANELS
        for target in panel["targets"]
        if "nv_gpu_" not in target["expr"] and "per_pos_total" not in target["expr"]
    }
    deadline = time.monotonic() + 2 * PATIENCE_S
    while wanted:
        assert time.monotonic() < deadline, f"no numbers for {sorted(wanted)}"
        ask_gateway(gateway)
        wanted -= {text for text in wanted if any(map(math.isfinite, prometheus.query(text)))}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_idle_server_raises_no_alert(rule: dict[str, Any], prometheus: Prometheus) -> None:
    wait_for(lambda: prometheus.query("up") == [1.0, 1.0], "two scrapes")
    wait_for(lambda: not prometheus.query(rule["expr"]), "silence")


@pytest.mark.parametrize("query", scaling_queries())
def test_autoscalers_get_one_number(query: str, prometheus: Prometheus) -> None:
    """It is 0 for an idle server, and other pods do not count."""
    wait_for(lambda: prometheus.query(query) == [0.0], "a scrape")
    assert not prometheus.query(query.replace("minisgl-replicas", "minisgl-others"))


def test_what_is_no_query_is_refused(prometheus: Prometheus) -> None:
    with pytest.raises(urllib.error.HTTPError):
        prometheus.query("sum by (")
