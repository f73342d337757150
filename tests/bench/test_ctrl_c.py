"""Ctrl-C in a terminal reaches all processes of a benchmark: those that help it ignore it, since it
ends them itself; each showed a traceback."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from minisgl_client.request import build

from minisgl_backend.errors import EngineFailure
from minisgl_bench.clients import ask_at_once
from minisgl_bench.plan_broadcast import followers_of
from minisgl_check.processes import children_of
from minisgl_kit.leaving import GrpcKill
from tests.client.test_retries import Script, grpc_server
from tests.waiting import wait_until


def test_followers_of_plan_broadcast() -> None:
    with followers_of(2, by_tcp=False) as followers:
        followers.channel.meet()
        assert ignores_ctrl_c(followers.pids[0])


def test_the_node_of_plan_broadcast() -> None:
    before = {*children_of(os.getpid())}
    with followers_of(2, by_tcp=True) as followers:
        followers.channel.meet()
        (node,) = {*children_of(os.getpid())} - before
        assert ignores_ctrl_c(node)


def test_a_client_that_is_killed() -> None:
    before = {*children_of(os.getpid())}
    message = build("minisgl", "", {"text_input": "x", "stream": True}).to_grpc(None)
    with grpc_server(Script([["a"]])) as address:
        client = GrpcKill(address, message)
        client.next()
        (process,) = {*children_of(os.getpid())} - before
        assert ignores_ctrl_c(process)
        client.leave()


def test_clients_that_ask_at_once() -> None:
    before = {*children_of(os.getpid())}

    def clients() -> set[int]:
        return {
            pid
            for pid in {*children_of(os.getpid())} - before
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        }

    with ThreadPoolExecutor(1) as pool:
        # nothing listens there, so they wait
        asking = pool.submit(ask_at_once, "127.0.0.1:1", [b"", b""], num_processes=2)
        try:
            wait_until(lambda: len(clients()) == 2 and all(map(ignores_ctrl_c, clients())))
        finally:
            for pid in clients():
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineFailure, match="a client ended without an answer"):
            asking.result()


def ignores_ctrl_c(pid: int) -> bool:
    """Whether a process ignores SIGINT, as the kernel shows it."""
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask, 16) & 1 << signal.SIGINT - 1)
