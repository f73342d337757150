"""What a container does, done here: the images' default command, the health check, the stop."""

from __future__ import annotations

import functools
import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml

from minisgl_backend.server.process import TritonServer
from tests.docker.conftest import DOCKER, tool
from tests.docker.dockerfile import stages, texts
from tests.docker.test_healthcheck import check
from tests.server.client import PATIENCE_S, wait_for
from tests.server.test_serve import PORTS, lines_until, serve

pytestmark = pytest.mark.server


def answers(url: str | urllib.request.Request) -> bool:
    """Whether a Kubernetes probe, or Prometheus, would be satisfied."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def test_the_images_default_command_serves_until_it_is_told_to_stop() -> None:
    lasts = [stages(DOCKER / name)[-1] for name in ("Dockerfile", "Dockerfile.cpu")]
    (command,) = {text for last in lasts for text in texts(last, "CMD")}
    name, *arguments = json.loads(command)
    assert name == "serve"
    with serve(*arguments, *PORTS) as process:
        welcome = "".join(lines_until(process, "Try it"))
        (http,) = re.findall(r"HTTP +http://\S+:(\d+)", welcome)
        (health,) = re.findall(r"health +http://\S+:(\d+)", welcome)
        for path in ("/live", "/ready"):
            url = f"http://127.0.0.1:{health}{path}"
            wait_for(functools.partial(answers, url), path)
        assert check(f"http://127.0.0.1:{http}").returncode == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(2 * PATIENCE_S) == 0


def test_the_composed_gateway_shows_its_health_to_all_and_its_metrics_to_prometheus(
    server: TritonServer, tmp_path: Path
) -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text("utf-8"))
    prometheus = yaml.safe_load((DOCKER / "prometheus/prometheus.yml").read_text("utf-8"))
    (job,) = [job for job in prometheus["scrape_configs"] if job["job_name"] == "gateway"]
    service = compose["services"]["gateway"]
    key_file = job["authorization"]["credentials_file"]
    (tmp_path / "api_key").write_text("a-key\n")  # as `openssl rand` ends it
    places = {key_file: str(tmp_path / "api_key"), "server:8001": f"127.0.0.1:{server.grpc_port}"}
    command = [functools.reduce(replace, places.items(), word) for word in service["command"]]
    with subprocess.Popen(
        [tool("minisgl"), *command, "--port=0"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip().split(":")[-1]
            check_words = [word.replace("9000", port) for word in service["healthcheck"]["test"]]
            health = [sys.executable, str(DOCKER / "healthcheck.py"), *check_words[3:]]
            assert subprocess.run(health, timeout=PATIENCE_S).returncode == 0
            url = f"http://127.0.0.1:{port}/metrics"
            assert not answers(url)
            authorization = {"Authorization": "Bearer a-key"}
            assert answers(urllib.request.Request(url, headers=authorization))
        finally:
            process.terminate()


def replace(text: str, change: tuple[str, str]) -> str:
    return text.replace(*change)
