"""The Kubernetes manifests are valid, and say what servers of language models need said."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from minisgl_backend.cli.main import main
from minisgl_backend.config import EngineOptions
from tests.docker.conftest import DOCKER, tool
from tests.docker.dockerfile import stages, texts
from tests.docs.test_docs import check_options

IMAGES: Final = {"minisgl": "Dockerfile", "gateway": "Dockerfile.cpu"}
"""The Dockerfile of each manifest's image."""


def manifest(name: str) -> Path:
    return DOCKER / f"kubernetes/{name}.yaml"


def resources(name: str) -> dict[str, Any]:
    """The resources of a manifest, by kind."""
    loaded = yaml.safe_load_all(manifest(name).read_text("utf-8"))
    return {resource["kind"]: resource for resource in loaded}


def instruction(name: str, kind: str) -> str:
    """The one instruction of that kind in the last stage of the image."""
    *_, last = stages(DOCKER / IMAGES[name])
    (text,) = texts(last, kind)
    return text


SERVER: Final = resources("minisgl")
POD: Final[dict[str, Any]] = SERVER["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]

manifests = pytest.mark.parametrize("name", IMAGES)


@manifests
def test_manifests_are_valid_to_the_letter(name: str, tmp_path: Path) -> None:
    def validate(path: Path) -> int:
        command = [tool("kubernetes-validate"), "--strict", str(path)]
        return subprocess.run(command, capture_output=True).returncode

    assert validate(manifest(name)) == 0
    misspelt = tmp_path / "misspelt.yaml"
    text = manifest(name).read_text("utf-8")
    misspelt.write_text(text.replace("readinessProbe", "readynessProbe"))
    assert validate(misspelt) != 0


@manifests
def test_commands_are_accepted(name: str) -> None:
    (container,) = resources(name)["Deployment"]["spec"]["template"]["spec"]["containers"]
    check_options(main, container["args"])


def test_the_server_runs_the_images_command_and_a_model() -> None:
    default = json.loads(instruction("minisgl", "CMD"))
    assert CONTAINER["args"][: len(default)] == default
    assert CONTAINER["args"][len(default)] == "--model"


@manifests
def test_what_names_a_port_names_one_that_is_exposed(name: str) -> None:
    found = resources(name)
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {str(port) for port in ports.values()} <= set(instruction(name, "EXPOSE").split())
    probes = [probe for key, probe in container.items() if key.endswith("Probe")]
    assert len(probes) >= 2
    named = {(probe.get("httpGet") or probe["tcpSocket"])["port"] for probe in probes}
    named |= {port["targetPort"] for port in found["Service"]["spec"]["ports"]}
    rules = found.get("NetworkPolicy", {"spec": {"ingress": []}})["spec"]["ingress"]
    named |= {port["port"] for rule in rules for port in rule["ports"]}
    assert named <= set(ports)


@manifests
def test_services_and_deployments_select_the_pods(name: str) -> None:
    found = resources(name)
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"].items() <= labels.items()
    assert found["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()


@manifests
def test_pods_have_few_rights(name: str) -> None:
    pod = resources(name)["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    user = f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
    assert instruction(name, "USER") == user


def test_only_clients_reach_triton_and_the_gateway_is_one() -> None:
    policy = SERVER["NetworkPolicy"]["spec"]
    labels = SERVER["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    open_to_all = [rule for rule in policy["ingress"] if "from" not in rule]
    assert {port["port"] for rule in open_to_all for port in rule["ports"]} == {"metrics", "health"}
    (guarded,) = [rule for rule in policy["ingress"] if "from" in rule]
    client = guarded["from"][0]["podSelector"]["matchLabels"]
    gateway = resources("gateway")["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert client.items() <= gateway.items()


def test_the_gateway_finds_the_server_and_its_keys() -> None:
    pod = resources("gateway")["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = dict(word.removeprefix("--").split("=") for word in container["args"][1:])
    host, port = options["triton"].split(":")
    assert host == SERVER["Service"]["metadata"]["name"]
    assert int(port) in {port["port"] for port in SERVER["Service"]["spec"]["ports"]}
    (mount,) = container["volumeMounts"]
    assert Path(options["api-key-file"]).parent == Path(mount["mountPath"])


def test_shared_memory_is_large_and_bounded() -> None:
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    shm = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert shm == {"medium": "Memory", "sizeLimit": "1Gi"}


def test_everything_that_is_written_to_is_a_volume() -> None:
    folders = dict(word.split("=", 1) for word in instruction("minisgl", "ENV").split())
    mounts = [mount["mountPath"] for mount in CONTAINER["volumeMounts"]]
    for name in ("HF_HOME", "TRITON_CACHE_DIR"):
        assert any(Path(folders[name]).is_relative_to(mount) for mount in mounts)
    assert "/tmp" in mounts


def test_a_stop_waits_until_requests_are_answered() -> None:
    pause_s = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][-1])
    # `minisgl serve` gives tritonserver 10 s more than the engine, and 8 s to unload
    needed_s = pause_s + EngineOptions().drain_timeout_s + 18
    assert POD["terminationGracePeriodSeconds"] > needed_s


def test_the_startup_probe_is_more_patient_than_a_download() -> None:
    probe = CONTAINER["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 900
