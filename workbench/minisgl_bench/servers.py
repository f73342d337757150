"""Starts servers for benchmarks: on free ports, ended with the block.

Knows how to start one; must not know what is measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from minisgl_backend.server.installation import find_installation
from minisgl_backend.server.launch import ServerOptions
from minisgl_backend.server.process import TritonServer
from minisgl_backend.server.repository import shipped_repository
from minisgl_kit.repositories import repository_with
from minisgl_kit.starts import ready

_STARTS_WITHIN_S: Final = 300.0
"""The demo model loads in seconds; a server that hangs must not block a benchmark."""

_PACED_MODEL: Final = """\
from pathlib import Path

from minisgl_bench.paced import paced_model

TritonPythonModel = paced_model(step_s={step_s!r}, journal={journal})
"""


@contextmanager
def started(
    options: Mapping[str, str], *, tritonserver: str | None = None, repository: Path | None = None
) -> Iterator[TritonServer]:
    """A server that is ready; by default of the shipped repository, with the demo model. One that
    crashes or hangs in its start is started again."""
    installation = find_installation(tritonserver)

    def start() -> TritonServer:
        ports = ServerOptions(http_port=0, grpc_port=0, metrics_port=0)
        return TritonServer(installation, repository or shipped_repository(), options, ports)

    server = ready(start, within_s=_STARTS_WITHIN_S)
    try:
        yield server
    finally:
        # not stopped: no answer is of use now, and after a signal there is no time to drain
        server.kill()


@contextmanager
def started_paced(
    options: Mapping[str, str],
    *,
    step_s: float,
    journal: Path | None = None,
    tritonserver: str | None = None,
) -> Iterator[TritonServer]:
    """A server whose engine takes ``step_s`` seconds a step and writes to ``journal``."""
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as folder:
        place = None if journal is None else f"Path({str(journal)!r})"
        model = _PACED_MODEL.format(step_s=step_s, journal=place)
        repository = repository_with({"llm_engine": model}, Path(folder))
        with started(options, tritonserver=tritonserver, repository=repository) as server:
            yield server
