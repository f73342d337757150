"""The Kubernetes manifests are valid by the schemas of what they make, and fit each other, the
images and the commands. ``test_kubernetes_running`` checks them against running servers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import pytest
import yaml
from minisgl_gateway.gateway_options import GatewayOptions

from minisgl_backend.cli.main import main
from minisgl_backend.config import EngineOptions
from minisgl_backend.parallel.nodes import check_nodes, with_environment
from tests.docker.conftest import DOCKER
from tests.docker.dockerfile import stages, texts
from tests.docker.manifests import FOLDER, NAMES, Pod, errors, one, pod_of, pods, resources
from tests.docker.promql import selectors
from tests.docs.test_docs import check_options

IMAGES: Final = {"minisgl:gpu": "Dockerfile", "minisgl:cpu": "Dockerfile.cpu"}
RESOURCES: Final = [(name, resource) for name in NAMES for resource in resources(name)]
PODS: Final = [pod for name in NAMES for pod in pods(name)]
OURS: Final = [
    (pod, container)
    for pod in PODS
    for container in pod.containers.values()
    if container["image"] in IMAGES
]
SERVERS: Final = [(pod, container) for pod, container in OURS if container["args"][0] == "serve"]
GATEWAYS: Final = [(pod, container) for pod, container in OURS if container["args"][0] == "gateway"]


def named(value: Any) -> str:
    """The name of a case."""
    if isinstance(value, Pod):
        return value.name
    if isinstance(value, dict):
        return str(value.get("kind") or value.get("name", "labels"))
    return str(value)


every_resource = pytest.mark.parametrize(("name", "resource"), RESOURCES, ids=named)
every_container = pytest.mark.parametrize(("pod", "container"), OURS, ids=named)
every_server = pytest.mark.parametrize(("pod", "container"), SERVERS, ids=named)


def instruction(image: str, kind: str) -> str:
    """The only instruction of that kind in the last stage of the image."""
    *_, last = stages(DOCKER / IMAGES[image])
    (text,) = texts(last, kind)
    return text


def default_of(command: str, option: str) -> Any:
    """What the command uses if the option is not given."""
    found = main.get_command(click.Context(main), command)
    assert found is not None
    (parameter,) = [one for one in found.params if option in one.opts]
    return parameter.get_default(click.Context(found))


def option(container: dict[str, Any], name: str) -> str | None:
    """The value of an option that is given as ``--name=value``."""
    values = [word.split("=", 1)[1] for word in container["args"] if word.startswith(f"{name}=")]
    return values[0] if values else None


def pause_s(container: dict[str, Any]) -> int:
    """How long a container continues before it is told to end."""
    return int(container["lifecycle"]["preStop"]["exec"]["command"][-1])


@every_resource
def test_resources_are_valid_to_the_letter(name: str, resource: dict[str, Any]) -> None:
    assert errors(resource) == []


@every_resource
def test_a_misspelt_field_is_found(name: str, resource: dict[str, Any]) -> None:
    """At the top of the resource, and in each mapping with fixed fields two levels down."""
    assert errors({**resource, "sepc": {}})
    if "spec" in resource:
        assert errors({**resource, "spec": {**resource["spec"], "misspelt": 1}})


@pytest.mark.parametrize("pod", PODS, ids=named)
def test_a_misspelt_probe_is_found_in_every_kind_of_pod(pod: Pod) -> None:
    text = yaml.safe_dump_all(
        [resource for _, resource in RESOURCES if '"readinessProbe"' in json.dumps(resource)]
    )
    wrong = [
        resource["metadata"]["name"]
        for resource in yaml.safe_load_all(text.replace("readinessProbe", "readynessProbe"))
        if errors(resource)
    ]
    assert pod.name.removesuffix("-predictor") in wrong


@every_container
def test_commands_are_accepted(pod: Pod, container: dict[str, Any]) -> None:
    check_options(main, container["args"])


@every_server
def test_servers_run_the_images_command_and_a_model(pod: Pod, container: dict[str, Any]) -> None:
    default = json.loads(instruction("minisgl:gpu", "CMD"))
    given = [word for argument in container["args"] for word in argument.split("=", 1)]
    assert given[: len(default)] == default
    assert given[len(default)] == "--model"


@every_container
def test_ports_are_those_of_the_command_and_of_the_image(
    pod: Pod, container: dict[str, Any]
) -> None:
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    command = container["args"][0]
    for name, number in ports.items():
        if name == "rendezvous":
            (given,) = [env["value"] for env in container["env"] if env["name"] == "MASTER_PORT"]
            assert number == int(given)
            continue
        flag = "--port" if command == "gateway" else f"--{name}-port"
        assert number == default_of(command, flag)
        assert str(number) in instruction(container["image"], "EXPOSE").split()


@every_container
def test_probes_ask_ports_that_the_container_has(pod: Pod, container: dict[str, Any]) -> None:
    probes = {key: probe for key, probe in container.items() if key.endswith("Probe")}
    assert {"readinessProbe", "livenessProbe"} <= set(probes)
    ports = {key for port in container["ports"] for key in (port["name"], port["containerPort"])}
    for probe in probes.values():
        assert (probe.get("httpGet") or probe["tcpSocket"])["port"] in ports


def selections() -> Iterator[tuple[str, dict[str, str], dict[str, Any]]]:
    """What selects pods: the manifest, the labels, the resource."""
    for name, resource in RESOURCES:
        spec = resource.get("spec", {})
        chosen = spec.get("podSelector") or spec.get("selector")
        if chosen:
            yield name, chosen.get("matchLabels", chosen), resource


@pytest.mark.parametrize(("name", "labels", "resource"), list(selections()), ids=named)
def test_selectors_find_their_pods(
    name: str, labels: dict[str, str], resource: dict[str, Any]
) -> None:
    """Each port that a resource names is one of its pods', too."""
    (pod,) = [pod for pod in PODS if labels.items() <= pod.labels.items()]
    spec = resource["spec"]
    asked = [port["targetPort"] for port in spec.get("ports", ())]
    asked += [port["number"] for port in spec.get("targetPorts", ())]
    asked += [port["port"] for rule in spec.get("ingress", ()) for port in rule.get("ports", ())]
    for port in asked:
        pod.port(port)


@every_container
def test_pods_have_few_rights(pod: Pod, container: dict[str, Any]) -> None:
    rights = {**pod.spec.get("securityContext", {}), **container["securityContext"]}
    assert rights["runAsNonRoot"] is True
    assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
    assert rights["allowPrivilegeEscalation"] is False
    assert rights["readOnlyRootFilesystem"] is True
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert pod.spec["automountServiceAccountToken"] is False
    user = f"{rights['runAsUser']}:{rights['runAsGroup']}"
    assert instruction(container["image"], "USER") == user


@pytest.mark.parametrize("name", ["minisgl", "nodes", "replicas"])
def test_only_clients_reach_triton_and_the_gateway_is_one(name: str) -> None:
    own, policy = pod_of(name), one(name, "NetworkPolicy")["spec"]
    open_to_all = [rule for rule in policy["ingress"] if "from" not in rule]
    reached = {port["port"] for rule in open_to_all for port in rule["ports"]}
    assert {"metrics", "health"} <= reached
    (server,) = [container for pod, container in SERVERS if pod.name == own.name]
    assert not reached & {port["name"] for port in server["ports"]} - {"metrics", "health"}
    for rule in policy["ingress"]:
        for peer in rule.get("from", ()):
            labels = peer["podSelector"]["matchLabels"].items()
            assert labels <= pod_of("gateway").labels.items() or labels <= own.labels.items()


def test_gateways_find_their_servers() -> None:
    """Including those that comments mention."""
    services = {
        resource["metadata"]["name"]: resource["spec"]["ports"]
        for _, resource in RESOURCES
        if resource["kind"] == "Service"
    }
    text = "".join(path.read_text("utf-8") for path in FOLDER.glob("*.yaml"))
    addresses = set(re.findall(r"--triton=(\S+):(\d+)", text))
    assert len(addresses) == 4
    for host, port in addresses:
        if host == "127.0.0.1":
            assert pod_of("replicas").port("grpc") == int(port)
        elif host == pod_of("kserve").name:  # KServe's service has the container's ports
            assert pod_of("kserve").port("grpc") == int(port)
        else:
            assert int(port) in {found["port"] for found in services[host]}


@pytest.mark.parametrize(("pod", "container"), GATEWAYS, ids=named)
def test_the_gateways_keys_are_mounted(pod: Pod, container: dict[str, Any]) -> None:
    (mount,) = container["volumeMounts"]
    assert Path(str(option(container, "--api-key-file"))).parent == Path(mount["mountPath"])
    (volume,) = [volume for volume in pod.spec["volumes"] if volume["name"] == mount["name"]]
    assert "secret" in volume


@every_server
def test_servers_have_shared_memory_and_volumes_for_all_that_is_written(
    pod: Pod, container: dict[str, Any]
) -> None:
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) <= set(volumes)
    shm = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert shm["medium"] == "Memory"
    assert shm["sizeLimit"].endswith("Gi")
    folders = dict(word.split("=", 1) for word in instruction("minisgl:gpu", "ENV").split())
    for name in ("HF_HOME", "TRITON_CACHE_DIR"):
        assert any(Path(folders[name]).is_relative_to(mount) for mount in mounts)
    assert "/tmp" in mounts


@every_container
def test_a_stop_waits_until_requests_are_answered(pod: Pod, container: dict[str, Any]) -> None:
    if container["args"][0] == "serve":
        # `minisgl serve` gives tritonserver 10 s more than the engine, and 8 s to unload
        drain_s = EngineOptions().drain_timeout_s + 18
    else:
        drain_s = GatewayOptions().drain_timeout_s
    assert pause_s(container) >= 5
    assert pod.spec["terminationGracePeriodSeconds"] > pause_s(container) + drain_s


def test_the_server_of_a_pod_outlives_what_its_gateway_takes() -> None:
    containers = pod_of("replicas").containers
    assert pause_s(containers["server"]) >= pause_s(containers["gateway"]) + 5


@every_server
def test_the_startup_probe_is_more_patient_than_a_download(
    pod: Pod, container: dict[str, Any]
) -> None:
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 900


def test_the_endpoint_picker_serves_the_pool_of_the_replicas() -> None:
    pool, replicas = one("inference-pool", "InferencePool"), pod_of("replicas")
    (port,) = pool["spec"]["targetPorts"]
    assert port["number"] == replicas.port("http")
    picker, service = pod_of("inference-pool"), one("inference-pool", "Service")
    reference = pool["spec"]["endpointPickerRef"]
    assert reference["name"] == service["metadata"]["name"]
    assert reference["port"]["number"] in {port["port"] for port in service["spec"]["ports"]}
    container = picker.containers["picker"]
    assert option(container, "--pool-name") == pool["metadata"]["name"]
    assert int(str(option(container, "--model-server-metrics-port"))) == replicas.port("metrics")
    (route,) = one("inference-pool", "HTTPRoute")["spec"]["rules"]
    (backend,) = route["backendRefs"]
    assert (backend["kind"], backend["name"]) == (pool["kind"], pool["metadata"]["name"])
    assert float(route["timeouts"]["request"].removesuffix("s")) >= GatewayOptions().timeout_s


def test_the_endpoint_pickers_configuration_holds_together() -> None:
    data = one("inference-pool", "ConfigMap")["data"]
    container = pod_of("inference-pool").containers["picker"]
    assert Path(str(option(container, "--config-file"))).name in data
    config = yaml.safe_load(data["config.yaml"])
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    (profile,) = config["schedulingProfiles"]
    assert {plugin["pluginRef"] for plugin in profile["plugins"]} < set(plugins)
    extractor = plugins["core-metrics-extractor"]
    engine = pod_of("replicas").labels[extractor["engineLabelKey"]]
    assert [config["name"] for config in extractor["engineConfigs"]] == [engine]


def test_the_autoscaler_counts_the_pods_that_it_scales() -> None:
    scaled = one("autoscaling", "ScaledObject")["spec"]
    assert scaled["scaleTargetRef"]["name"] == one("replicas", "Deployment")["metadata"]["name"]
    assert scaled["minReplicaCount"] < scaled["maxReplicaCount"]
    for trigger in scaled["triggers"]:
        assert float(trigger["metadata"]["threshold"]) > 0
        for selector in selectors(trigger["metadata"]["query"]):
            (pattern,) = [pattern for label, pattern in selector.matchers if label == "pod"]
            assert re.fullmatch(pattern, "minisgl-replicas-7d9f-x2x")


def test_ranks_of_a_group_share_a_secret_and_a_rendezvous() -> None:
    group, pod = one("nodes", "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"], pod_of("nodes")
    server = pod.containers["server"]
    gpus = int(server["resources"]["limits"]["nvidia.com/gpu"])
    assert int(str(option(server, "--tensor-parallel-size"))) == group["size"] * gpus
    assert group["workerTemplate"]["spec"] == group["leaderTemplate"]["spec"]
    workers = group["workerTemplate"]["metadata"]
    assert "annotations" not in workers  # they have no metrics
    mounts = {mount["mountPath"]: mount["name"] for mount in server["volumeMounts"]}
    folder = str(Path(str(option(server, "--node-secret-file"))).parent)
    (volume,) = [one for one in pod.spec["volumes"] if one["name"] == mounts[folder]]
    assert "secret" in volume
    peers = one("nodes", "NetworkPolicy")["spec"]["ingress"][0]
    assert "ports" not in peers  # ranks meet at free ports
    assert peers["from"][0]["podSelector"]["matchLabels"].items() <= workers["labels"].items()


def test_a_group_of_the_manifest_forms_by_its_environment() -> None:
    """With the environment that LeaderWorkerSet sets in each container."""
    server = pod_of("nodes").containers["server"]
    (port,) = [env["value"] for env in server["env"] if env["name"] == "MASTER_PORT"]
    size = one("nodes", "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]["size"]
    leader = "minisgl-nodes-0.minisgl-nodes"
    told = {"LWS_LEADER_ADDRESS": leader, "MASTER_PORT": port}
    for index in range(size):
        own = {"LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": str(index)}
        found = with_environment(EngineOptions(tensor_parallel_size=16), {**told, **own})
        check_nodes(found)
        assert (found.nnodes, found.node_rank) == (size, index)
        assert found.rendezvous == f"{leader}:{pod_of('nodes').port('rendezvous')}"
