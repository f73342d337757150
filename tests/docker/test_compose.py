"""The compose files are valid, and safe by default."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
import yaml

from minisgl_backend.cli.main import main
from minisgl_backend.config import EngineOptions
from tests.docker.conftest import DOCKER, ROOT, tool
from tests.docker.dockerfile import stages, texts
from tests.docs.test_docs import check_options

CPU: Final = [DOCKER / "compose.yaml"]
GPU: Final = [*CPU, DOCKER / "compose.gpu.yaml"]
SERVICES: Final[dict[str, Any]] = yaml.safe_load(CPU[0].read_text("utf-8"))["services"]


def understood(files: list[Path]) -> dict[str, Any]:
    """The services as Docker Compose understands these files together."""
    options = [part for file in files for part in ("-f", str(file))]
    command = [tool("docker-compose"), *options, "config"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    return loaded


@pytest.mark.parametrize(("files", "dockerfile"), [(CPU, "Dockerfile.cpu"), (GPU, "Dockerfile")])
def test_compose_accepts_the_files(files: list[Path], dockerfile: str) -> None:
    found = understood(files)
    assert set(found) == {"server", "gateway", "prometheus", "grafana"}
    assert found["server"]["build"]["dockerfile"] == f"docker/{dockerfile}"
    assert Path(found["server"]["build"]["context"]) == ROOT


def test_the_gpu_is_asked_for() -> None:
    (device,) = understood(GPU)["server"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


def test_ports_are_published_on_the_loopback_address_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert ports
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []
    assert "ports:" not in GPU[1].read_text("utf-8")


def test_images_are_pinned_and_mounts_exist() -> None:
    for service in SERVICES.values():
        name, _, version = service["image"].partition(":")
        assert version and version != "latest", name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DOCKER / source).exists(), source


def test_the_server_has_few_rights_and_enough_shared_memory() -> None:
    assert SERVICES["server"]["shm_size"] == "1gb"
    for name in ("server", "gateway"):
        assert SERVICES[name]["read_only"] is True
        assert SERVICES[name]["cap_drop"] == ["ALL"]


def test_a_stop_waits_until_requests_are_answered() -> None:
    grace = SERVICES["server"]["stop_grace_period"]
    amounts = re.findall(r"(\d+)([ms])", grace)
    grace_s = sum(int(amount) * {"m": 60, "s": 1}[unit] for amount, unit in amounts)
    # `minisgl serve` gives tritonserver 10 s more than the engine, and 8 s to unload
    assert grace_s > EngineOptions().drain_timeout_s + 18


def test_commands_are_accepted() -> None:
    for name in ("server", "gateway"):
        check_options(main, SERVICES[name]["command"])
    check = SERVICES["gateway"]["healthcheck"]["test"]
    assert check[1:3] == ["python", "/opt/minisgl/docker/healthcheck.py"]
    (gateway_port,) = SERVICES["gateway"]["ports"]
    assert urlsplit(check[-1]).port == int(gateway_port.split(":")[1])


def test_prometheus_scrapes_what_runs() -> None:
    config = yaml.safe_load((DOCKER / "prometheus/prometheus.yml").read_text("utf-8"))
    targets = [job["static_configs"][0]["targets"] for job in config["scrape_configs"]]
    *_, last = stages(DOCKER / "Dockerfile.cpu")
    (exposed,) = texts(last, "EXPOSE")
    assert {target.partition(":")[0] for (target,) in targets} == {"server", "gateway"}
    assert {target.partition(":")[2] for (target,) in targets} <= set(exposed.split())


def test_the_key_of_the_gateway_is_read_where_it_is_mounted() -> None:
    loaded = yaml.safe_load((DOCKER / "compose.yaml").read_text("utf-8"))
    path = "/run/secrets/api_key"
    assert loaded["secrets"]["api_key"]["file"] == "./api_key"
    assert f"--api-key-file={path}" in loaded["services"]["gateway"]["command"]
    assert path in (DOCKER / "prometheus/prometheus.yml").read_text("utf-8")
    for name in ("gateway", "prometheus"):
        assert loaded["services"][name]["secrets"] == ["api_key"]
    for ignored in (ROOT / ".dockerignore", DOCKER / ".gitignore"):
        assert "api_key" in ignored.read_text("utf-8")
