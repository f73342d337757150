"""Starting the process of tritonserver: its command line, its environment, its ties to this one.

Knows what the models are told through the environment. Must not know what becomes of the process.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from pathlib import Path
from typing import Final

from minisgl_backend.death_signal import asking_for
from minisgl_backend.errors import ConfigError
from minisgl_backend.server.installation import Installation
from minisgl_backend.server.options import ServerOptions, command_line
from minisgl_backend.server.repository import keep_no_bytecode
from minisgl_backend.shared_names import HTTP_URL_VARIABLE, RUNTIME_DIRECTORY_VARIABLE

_MOST_DESCRIPTORS: Final = 65536
_LEAST_DESCRIPTORS: Final = 256
"""A start takes some 80, and each connection one."""

_NVIDIA_DRIVER: Final = Path("/proc/driver/nvidia/version")


def launch(
    installation: Installation,
    options: ServerOptions,
    *,
    directory: Path,
    repository: Path,
    shared_memory_prefix: str,
    admin_key: str,
    url: str,
    lock: int,
) -> subprocess.Popen[str]:
    """Start tritonserver, with its log on stdout.

    It is the first process of a session of its own, holds the descriptor ``lock`` too, and gets
    SIGTERM when the thread that called this ends. ``url`` is where it will listen.
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
        arguments.append(f"--backend-directory={backends}")
    environment = installation.environment({**os.environ, **options.environment})
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
        # a Ctrl-C in the terminal is for this process alone, which passes it on
        start_new_session=True,
        # it ends with the thread that starts it
        preexec_fn=asking_for(signal.SIGTERM),
        pass_fds=(lock,),
    )


def raise_descriptor_limit() -> None:
    """Let this process and its children have as many descriptors as the operator's limits allow.

    Raises ``ConfigError`` where those are too few for a server.
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
