"""Servers that are started, used and stopped, again and again: they may leave nothing behind.

Knows processes and files of this machine. Must not be used next to a server that others share.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Final

from minisgl_client.client import Client

from minisgl_backend.server.installation import find_installation
from minisgl_backend.server.launch import ServerOptions
from minisgl_backend.server.process import TritonServer
from minisgl_backend.server.repository import shipped_repository
from minisgl_check.case import Case
from minisgl_check.own_server import OPTIONS, PATIENCE_S
from minisgl_check.waiting import wait_until

_GONE_WITHIN_S: Final = 10.0
"""How long init, or a subreaper, may take to reap killed processes."""


def restarts(count: int, *, tritonserver: str | None = None) -> Case:
    """Start servers, one after the other; every fifth is killed, the others are stopped."""
    case = Case("start, serve, stop", count)
    for index in range(count):
        before = _held()
        server = TritonServer(
            find_installation(tritonserver),
            shipped_repository(),
            OPTIONS,
            ServerOptions(http_port=0, grpc_port=0, metrics_port=0, exit_timeout_s=10),
        )
        try:
            server.wait_ready(PATIENCE_S)
            with Client(f"127.0.0.1:{server.grpc_port}") as client:
                client.generate(input_ids=[1, 2, 3], max_tokens=4)
        finally:
            if index % 5 == 4:
                server.kill()
            else:
                code = server.stop()
                case.expect(code == 0, f"server {index} ended with code {code}")
        case.expect(not server.directory.exists(), f"files of server {index} are left")
        case.expect(not server.shared_memory_regions(), f"shared memory of server {index} is left")
        gone = wait_until(partial(_is_gone, server.pid), _GONE_WITHIN_S)
        case.expect(gone, f"processes of server {index} are left")
        # the first one brings what stays: gRPC's threads and descriptors
        after = _held()
        case.expect(index == 0 or after <= before, f"server {index}: {before} became {after}")
    case.what = f"{count} servers, {count // 5} of them killed"
    return case


def _held() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return threading.active_count(), len(os.listdir(Path("/proc/self/fd")))


def _is_gone(group: int) -> bool:
    """Whether no process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False
