"""The Kubernetes manifest is valid, and says what a server of language models needs said."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Final

import yaml

from minisgl_backend.config import EngineOptions
from tests.docker.conftest import DOCKER, tool
from tests.docker.dockerfile import stages, texts

MANIFEST: Final = DOCKER / "kubernetes/minisgl.yaml"
BY_KIND: Final[dict[str, Any]] = {
    resource["kind"]: resource for resource in yaml.safe_load_all(MANIFEST.read_text("utf-8"))
}
POD: Final[dict[str, Any]] = BY_KIND["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def test_the_manifest_is_valid_to_the_letter(tmp_path: Path) -> None:
    def validate(manifest: Path) -> int:
        command = [tool("kubernetes-validate"), "--strict", str(manifest)]
        return subprocess.run(command, capture_output=True, check=False).returncode

    assert validate(MANIFEST) == 0
    misspelt = tmp_path / "misspelt.yaml"
    misspelt.write_text(MANIFEST.read_text("utf-8").replace("readinessProbe", "readynessProbe"))
    assert validate(misspelt) != 0


def test_the_command_is_the_images_and_a_model() -> None:
    *_, last = stages(DOCKER / "Dockerfile")
    (command,) = texts(last, "CMD")
    default = json.loads(command)
    assert CONTAINER["args"][: len(default)] == default
    assert CONTAINER["args"][len(default)] == "--model"


def test_probes_and_services_name_ports_that_the_image_exposes() -> None:
    *_, last = stages(DOCKER / "Dockerfile")
    (exposed,) = texts(last, "EXPOSE")
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert {str(port) for port in ports.values()} == set(exposed.split())
    probes = [CONTAINER[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    named = {probe["httpGet"]["port"] for probe in probes if "httpGet" in probe}
    named |= {port["targetPort"] for port in BY_KIND["Service"]["spec"]["ports"]}
    rules = BY_KIND["NetworkPolicy"]["spec"]["ingress"]
    named |= {port["port"] for rule in rules for port in rule["ports"]}
    assert named <= set(ports)


def test_the_service_and_the_deployment_select_the_pods() -> None:
    labels = BY_KIND["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert BY_KIND["Service"]["spec"]["selector"].items() <= labels.items()
    assert BY_KIND["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_only_clients_reach_triton() -> None:
    policy = BY_KIND["NetworkPolicy"]["spec"]
    labels = BY_KIND["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    open_to_all = [rule for rule in policy["ingress"] if "from" not in rule]
    ports = {port["port"] for rule in open_to_all for port in rule["ports"]}
    assert ports == {"metrics", "health"}


def test_shared_memory_is_large_and_bounded() -> None:
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    shm = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert shm == {"medium": "Memory", "sizeLimit": "1Gi"}


def test_everything_that_is_written_to_is_a_volume() -> None:
    *_, last = stages(DOCKER / "Dockerfile")
    (environment,) = texts(last, "ENV")
    folders = dict(word.split("=", 1) for word in environment.split())
    mounts = [mount["mountPath"] for mount in CONTAINER["volumeMounts"]]
    for name in ("HF_HOME", "TRITON_CACHE_DIR"):
        assert any(Path(folders[name]).is_relative_to(mount) for mount in mounts)
    assert "/tmp" in mounts
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_pod_has_few_rights() -> None:
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["automountServiceAccountToken"] is False
    assert CONTAINER["securityContext"]["allowPrivilegeEscalation"] is False
    assert CONTAINER["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    *_, last = stages(DOCKER / "Dockerfile")
    assert texts(last, "USER") == [
        f"{POD['securityContext']['runAsUser']}:{POD['securityContext']['runAsGroup']}"
    ]


def test_a_stop_waits_until_requests_are_answered() -> None:
    pause_s = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][-1])
    # `minisgl serve` gives tritonserver 10 s more than the engine, and 8 s to unload
    needed_s = pause_s + EngineOptions().drain_timeout_s + 18
    assert POD["terminationGracePeriodSeconds"] > needed_s


def test_the_startup_probe_is_more_patient_than_a_download() -> None:
    probe = CONTAINER["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 900
