"""Servers for the tests; the shared ones are fixtures of `tests/conftest.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from minisgl_backend.server.installation import find_installation
from minisgl_backend.server.launch import ServerOptions
from minisgl_backend.server.process import TritonServer
from minisgl_backend.server.repository import shipped_repository
from minisgl_kit.repositories import repository_with
from minisgl_kit.starts import ready
from tests.waiting import wait_until

PACED_STEP_S = 0.02
_PACED = """\
from minisgl_bench.paced import paced_model

TritonPythonModel = paced_model(step_s={step_s})
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder starts a tritonserver."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("server")


@contextmanager
def running(
    repository: Path | None = None,
    *,
    options: Mapping[str, str] | None = None,
    exit_timeout_s: int = 30,
    exit_code: int | None = 0,
    is_ready: bool = True,
) -> Iterator[TritonServer]:
    """A ready server; when the block is left, it must end cleanly and leave nothing behind.

    An ``exit_code`` of None stands for any; without ``is_ready`` the server has just been started.
    """

    def start() -> TritonServer:
        ports = ServerOptions(
            http_port=0, grpc_port=0, metrics_port=0, exit_timeout_s=exit_timeout_s
        )
        models = repository or shipped_repository()
        return TritonServer(find_installation(), models, options or {}, ports)

    server = ready(start) if is_ready else start()
    try:
        if is_ready:
            # 24.10 opens this port last, when it is already ready
            wait_until(lambda: server.num_failed(timeout_s=1.0) is not None)
        yield server
    finally:
        code = server.stop()
    assert exit_code is None or code == exit_code, "\n".join(list(server.log)[-40:])
    assert not server.shared_memory_regions()
    assert not server.directory.exists()


def paced_repository(folder: Path, *, step_s: float = PACED_STEP_S) -> Path:
    """A model repository with a paced engine."""
    return repository_with({"llm_engine": _PACED.format(step_s=step_s)}, folder)
