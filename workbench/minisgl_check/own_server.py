"""A supervised server of the check's own, in which faults may be provoked.

Knows how ``minisgl serve`` puts a server together. Must not know cases.

It has few pages, a short queue and two adapter slots, so that a few requests are enough for
eviction, retraction and refusals.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from types import MappingProxyType
from typing import Final

from minisgl_backend.errors import EngineFailure, MiniSGLError
from minisgl_backend.server.health import HealthServer
from minisgl_backend.server.installation import find_installation
from minisgl_backend.server.launch import ServerOptions
from minisgl_backend.server.process import TritonServer
from minisgl_backend.server.repository import shipped_repository
from minisgl_backend.server.stop_event import StopEvent
from minisgl_backend.server.supervisor import Supervisor
from minisgl_check.defect import Switch
from minisgl_check.target import Target
from minisgl_check.waiting import wait_until

OPTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "page_size": "16",
        "num_pages": "64",
        "max_running_requests": "4",
        "max_queued_requests": "12",
        "max_prefill_tokens": "128",
        "drain_timeout_s": "1",
        "enable_lora": "true",
        "lora_updates": "true",
        "max_loras": "2",
    }
)
PATIENCE_S: Final = 300.0
"""How long a server may take to be ready on a busy machine."""


@dataclass(frozen=True, slots=True)
class OwnServer(Target):
    """A target whose processes are ours."""

    supervisor: Supervisor

    def pid(self, model: str) -> int:
        """The process id of a model; raises ``EngineFailure`` if it has none."""
        process = self.stats().processes.get(model)
        if process is None:
            raise EngineFailure(f"{model} has no process")
        return int(process["pid"])

    def send(self, model: str, number: int) -> int:
        """Send a signal to a model's process; returns the process id."""
        pid = self.pid(model)
        os.kill(pid, number)
        return pid

    @property
    def server(self) -> TritonServer:
        """The tritonserver that runs now."""
        return self.supervisor.server

    @property
    def switch(self) -> Switch:
        """The switch of the engine's defects, if it has any."""
        return Switch(self.server.directory)


@contextmanager
def started(
    options: Mapping[str, str] = OPTIONS,
    *,
    repository: Path | None = None,
    tritonserver: str | None = None,
) -> Iterator[OwnServer]:
    """A server that is ready; by default of the shipped repository, with the demo model."""
    installation = find_installation(tritonserver)
    stopping = StopEvent()
    made: queue.SimpleQueue[Supervisor | None] = queue.SimpleQueue()
    errors: list[MiniSGLError] = []

    def start(server_options: ServerOptions) -> TritonServer:
        return TritonServer(
            installation, repository or shipped_repository(), options, server_options
        )

    def live() -> None:
        try:
            ports = ServerOptions(http_port=0, grpc_port=0, metrics_port=0, exit_timeout_s=5)
            supervisor = Supervisor(start, ports)
            made.put(supervisor)
            supervisor.run(stopping)
        except MiniSGLError as error:
            errors.append(error)
        finally:
            made.put(None)  # in case there is no supervisor; otherwise it is never taken

    # the kernel ends a server with the thread that started it
    thread = threading.Thread(target=live, name="supervisor")
    health = HealthServer("127.0.0.1", 0)
    supervisor: Supervisor | None = None
    thread.start()
    try:
        supervisor = made.get()
        if supervisor is None:
            raise errors[0] if errors else EngineFailure("the server could not be started")
        health.start(supervisor.health, supervisor.stats)
        server = supervisor.server
        own = OwnServer(
            grpc_address=f"127.0.0.1:{server.grpc_port}",
            http_url=server.url(),
            health_url=f"http://127.0.0.1:{health.port}",
            supervisor=supervisor,
        )
        if not wait_until(lambda: own.is_ready() or not thread.is_alive(), PATIENCE_S):
            raise EngineFailure("the server was not ready in time")
        if not thread.is_alive():
            raise errors[0] if errors else EngineFailure("the server ended")
        yield own
    finally:
        stopping.set()
        if supervisor is not None:
            # Triton 24.10 cannot unload a model that has lost a request
            supervisor.server.signal(SIGKILL)
        thread.join()
        health.close()
