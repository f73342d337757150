"""Starts the process of tritonserver: its options, its command line, its ties to this process.

Knows Triton's options, which endpoints are reserved for the operator, and the environment variables
that the models read. Must not know what happens to the process later.
"""

from __future__ import annotations

import ipaddress
import os
import resource
import signal
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from minisgl_backend.addresses import from_here
from minisgl_backend.death_signal import asking_for
from minisgl_backend.errors import ConfigError
from minisgl_backend.runtime_files import HTTP_URL_VARIABLE, RUNTIME_DIRECTORY_VARIABLE
from minisgl_backend.server.installation import Installation
from minisgl_backend.server.repository import keep_no_bytecode

ADMIN_KEY_HEADER: Final = "minisgl-admin-key"
"""The HTTP header that unlocks restricted endpoints; its random value stays in this process."""

_RESTRICTED: Final = "model-repository,shared-memory,trace,logging"
"""Endpoints that could unload models, map memory or fill the disk; not for clients."""
_MOST_DESCRIPTORS: Final = 65536
_LEAST_DESCRIPTORS: Final = 256
"""A start takes some 80, and each connection takes one."""

_NVIDIA_DRIVER: Final = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """``host`` is a numeric address; a port of 0 stands for a free one. ``adapters`` are those that
    the previous server's engine knew, by name; None if they are those of its options."""

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    log_verbose: int = 0
    exit_timeout_s: int = 40
    adapters: Mapping[str, str] | None = None

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return ipaddress.ip_address(self.host).is_loopback

    def address(self, port: int) -> str:
        """HOST:PORT from this machine."""
        return from_here(self.host, port)


def launch(
    installation: Installation,
    options: ServerOptions,
    *,
    directory: Path,
    repository: Path,
    shared_memory_prefix: str,
    admin_key: str,
    url: str,
    locks: Collection[int],
) -> subprocess.Popen[str]:
    """Start tritonserver, with its log on stdout.

    It leads a session of its own, holds the descriptors of ``locks`` too, and is killed when the
    thread that called this ends. ``url`` is where it will listen.
    """
    arguments = [
        str(installation.binary),
        f"--model-repository={repository}",
        f"--backend-config=python,shm-region-prefix-name={shared_memory_prefix}",
        *command_line(options, admin_key),
    ]
    if not _NVIDIA_DRIVER.exists():
        arguments.append("--allow-gpu-metrics=false")
    backends = installation.make_backend_directory(directory)
    if backends is not None:
        keep_no_bytecode(backends / "python")
    backends = backends or installation.backends
    if backends is not None:
        arguments.append(f"--backend-directory={backends}")
    environment = installation.environment(os.environ)
    environment[RUNTIME_DIRECTORY_VARIABLE] = str(directory)
    environment[HTTP_URL_VARIABLE] = url
    return subprocess.Popen(
        arguments,
        cwd=directory,  # the models' processes import from the folder that they are started in
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        # Ctrl-C in the terminal is for this process alone, which passes it on
        start_new_session=True,
        # it ends with the thread that starts it, and at once: nothing would watch it drain, and the
        # next server needs its ports
        preexec_fn=asking_for(signal.SIGKILL),
        pass_fds=tuple(locks),
    )


def command_line(options: ServerOptions, admin_key: str) -> list[str]:
    """tritonserver's arguments, except those that name files."""
    host = options.host
    grpc_host, http_host = (f"[{host}]", f"ipv6:{host}") if ":" in host else (host, host)
    return [
        "--model-control-mode=explicit",
        "--load-model=*",
        "--disable-auto-complete-config",
        "--strict-readiness=true",
        "--exit-on-error=true",
        f"--exit-timeout-secs={options.exit_timeout_s}",
        f"--http-address={http_host}",
        f"--http-port={options.http_port}",
        f"--grpc-address={grpc_host}",
        f"--grpc-port={options.grpc_port}",
        f"--metrics-address={http_host}",
        f"--metrics-port={options.metrics_port}",
        f"--http-restricted-api={_RESTRICTED}:{ADMIN_KEY_HEADER}={admin_key}",
        f"--grpc-restricted-protocol={_RESTRICTED}:{ADMIN_KEY_HEADER}={admin_key}",
        f"--log-verbose={options.log_verbose}",
    ]


def raise_descriptor_limit() -> None:
    """Let this process and its children have as many descriptors as the operator's limits allow.

    Raises ``ConfigError`` if those are too few for a server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if most < _LEAST_DESCRIPTORS:
        raise ConfigError(
            f"a server needs {_LEAST_DESCRIPTORS} descriptors at least, and may have {most} "
            "(ulimit -n)"
        )
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
