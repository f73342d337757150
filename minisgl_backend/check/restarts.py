"""Servers that are started, asked and stopped, again and again: nothing of them may be left.

Knows processes and files of this machine. Must not be used beside a server that others share.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from minisgl_client.client import Client

from minisgl_backend.check.case import Case
from minisgl_backend.check.own_server import OPTIONS, PATIENCE_S
from minisgl_backend.server.installation import find_installation
from minisgl_backend.server.options import ServerOptions
from minisgl_backend.server.process import TritonServer
from minisgl_backend.server.repository import shipped_repository


def restarts(count: int, *, tritonserver: str | None = None) -> Case:
    """Every fifth server is killed, the others end by themselves."""
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
        case.expect(not _group_exists(server.pid), f"processes of server {index} are left")
        # the first one brings what stays: gRPC's threads and its descriptors
        after = _held()
        case.expect(index == 0 or after <= before, f"server {index}: {before} became {after}")
    case.what = f"{count} servers, {count // 5} of them killed"
    return case


def _held() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return threading.active_count(), len(os.listdir(Path("/proc/self/fd")))


def _group_exists(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True
