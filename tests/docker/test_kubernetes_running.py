"""A pod of the manifests as processes: its probes, metrics, and end, as a kubelet does them.

The containers' own commands run, except for what a machine without a cluster lacks: the model, free
ports, a file with a key.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from minisgl_backend.config import DEMO_MODEL
from minisgl_check.machines import free_port
from tests.docker.conftest import tool
from tests.docker.manifests import Pod, one, pod_of
from tests.docker.promql import missing, selectors, series
from tests.docker.test_kubernetes import option, pause_s
from tests.server.client import PATIENCE_S, wait_for
from tests.server.test_serve import lines_until, serve

pytestmark = pytest.mark.server

KEY: Final = "a-key-of-this-test"
ADDRESSES: Final = {
    "grpc": r"gRPC +\S+:(\d+)",
    "metrics": r"metrics +http://\S+:(\d+)/",
    "health": r"health +http://\S+:(\d+)/",
}
_DRAIN_S: Final = 120
"""How long answers in progress may take on a busy machine."""
_SPREAD_S: Final = 3.0
"""How long it takes until the last of a cluster's proxies knows about the end of a pod."""


@dataclass(slots=True)
class Running:
    """The containers of a pod, and the actual number of each of its ports."""

    pod: Pod
    processes: dict[str, subprocess.Popen[str]]
    ports: dict[str, int]

    def probe(self, asked: dict[str, Any]) -> int:
        """The status that a kubelet gets; 0 if nothing listens."""
        return status(self.ports[asked["port"]], asked["path"])

    def ask(self, **more: Any) -> dict[str, Any]:
        """One chat through the gateway; raises ``OSError`` if it is refused or cut."""
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        body = {"model": "minisgl", "messages": messages, "max_tokens": 8, **more}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports['http']}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
        )
        with urllib.request.urlopen(request, timeout=2 * PATIENCE_S) as response:
            answer: dict[str, Any] = json.load(response)
        return answer


def status(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S
        ) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def server_arguments(container: dict[str, Any]) -> list[str]:
    """The container's command with the demo model and free ports."""
    _, *arguments = container["args"]
    at = arguments.index("--model") + 1
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics", "health")]
    return [*arguments[:at], DEMO_MODEL, *arguments[at + 1 :], *ports]


def gateway_arguments(container: dict[str, Any], triton: int, keys: Path) -> list[str]:
    replaced = {
        option(container, "--triton"): f"127.0.0.1:{triton}",
        option(container, "--api-key-file"): str(keys),
    }
    arguments = [
        f"{name}={replaced.get(value, value)}"
        for name, value in (word.split("=", 1) for word in container["args"][1:])
    ]
    return ["gateway", *arguments, "--port=0", f"--drain-timeout-s={_DRAIN_S}"]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """A pod of replicas.yaml that takes requests."""
    pod = pod_of("replicas")
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    with ExitStack() as stack:
        server = stack.enter_context(
            serve(*server_arguments(pod.containers["server"]), f"--drain-timeout-s={_DRAIN_S}")
        )
        text = "".join(lines_until(server, "health "))
        ports = {name: int(re.findall(where, text)[0]) for name, where in ADDRESSES.items()}
        # what it prints later must not fill the pipe
        assert server.stdout is not None
        threading.Thread(target=server.stdout.read, daemon=True).start()
        arguments = gateway_arguments(pod.containers["gateway"], ports["grpc"], keys)
        gateway = stack.enter_context(
            subprocess.Popen(
                [tool("minisgl"), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
        stack.callback(gateway.kill)
        assert gateway.stdout is not None
        ports["http"] = int(gateway.stdout.readline().rpartition(":")[2])
        running = Running(pod, {"server": server, "gateway": gateway}, ports)
        wait_for(lambda: status(ports["http"], "/health") == 200, "the gateway")
        yield running


def test_probes_and_metrics_are_where_the_manifests_say(running: Running) -> None:
    for container in running.pod.containers.values():
        for key, probe in container.items():
            if key.endswith("Probe") and "httpGet" in probe:
                assert running.probe(probe["httpGet"]) == 200, key
    annotations = running.pod.annotations
    assert running.pod.port("metrics") == int(annotations["prometheus.io/port"])
    path = annotations.get("prometheus.io/path", "/metrics")
    running.ask()
    with urllib.request.urlopen(f"http://127.0.0.1:{running.ports['metrics']}{path}") as response:
        page = series(response.read().decode())
    config = yaml.safe_load(one("inference-pool", "ConfigMap")["data"]["config.yaml"])
    (extractor,) = [one for one in config["plugins"] if one["type"] == "core-metrics-extractor"]
    (engine,) = extractor["parameters"]["engineConfigs"]
    asked = {key: value for key, value in engine.items() if key.endswith("Spec")}
    assert {"queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec"} <= set(asked)
    for spec in asked.values():
        assert [lack for found in selectors(spec) for lack in missing(found, page)] == []
    (cache,) = page[asked["cacheInfoSpec"]]
    assert int(cache["block_size"]) > 0
    assert int(cache["num_gpu_blocks"]) > 0


def test_a_pod_that_ends_takes_nothing_new_and_loses_nothing(running: Running) -> None:
    """What the cluster sends until all of it knows is answered, and so is what is in progress."""
    containers = running.pod.containers
    deleted_s, ended = time.monotonic(), threading.Event()

    def clients() -> list[int]:
        """Ask until no proxy sends anything here any more; returns the lengths of the answers."""
        lengths = []
        while not ended.is_set():
            lengths.append(running.ask()["usage"]["completion_tokens"])
        return lengths

    def stop(name: str) -> None:
        time.sleep(max(0.0, deleted_s + pause_s(containers[name]) - time.monotonic()))
        assert ended.wait(PATIENCE_S)  # at once, unless this process was stalled
        running.processes[name].send_signal(signal.SIGTERM)

    with ThreadPoolExecutor() as pool:
        long = pool.submit(running.ask, max_tokens=600, min_tokens=600, ignore_eos=True)
        asking = [pool.submit(clients) for _ in range(3)]
        stops = [pool.submit(stop, name) for name in containers]
        time.sleep(_SPREAD_S)
        ended.set()
        answers = [length for client in asking for length in client.result()]
        wait_for(lambda: status(running.ports["http"], "/health") == 0, "no new request")
        with pytest.raises(OSError):
            running.ask()
        assert long.result()["usage"]["completion_tokens"] == 600
        for stopped in stops:
            stopped.result()
    assert answers and all(answers)
    grace_s = running.pod.spec["terminationGracePeriodSeconds"]
    for process in running.processes.values():
        assert process.wait(timeout=grace_s + _DRAIN_S) == 0


def test_a_pod_is_alive_before_it_is_ready() -> None:
    """So it is not killed while its model loads."""
    container = pod_of("replicas").containers["server"]
    arguments = [
        *server_arguments(container)[:-1],
        f"--health-port={(port := free_port('127.0.0.1'))}",
    ]
    probes = {key: probe["httpGet"]["path"] for key, probe in container.items() if "Probe" in key}
    with serve(*arguments) as process:
        kinds = ("livenessProbe", "startupProbe", "readinessProbe")
        wait_for(lambda: [status(port, probes[kind]) for kind in kinds] == [200, 503, 503], "life")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
