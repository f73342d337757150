"""The servers that benchmarks start, with a fake binary."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from minisgl_backend.runtime_files import QUEUE_OPEN
from minisgl_bench.servers import started_paced
from tests.unit.server.test_start import fake_server


def test_an_interrupted_benchmark_leaves_nothing_and_waits_for_no_answers(tmp_path: Path) -> None:
    """A drain may take longer than an interrupted benchmark has to clean up."""
    binary = str(fake_server(tmp_path).binary)
    with (
        pytest.raises(KeyboardInterrupt),
        started_paced({}, step_s=1.0, tritonserver=binary) as server,
    ):
        (server.directory / f"{QUEUE_OPEN}.engine").touch()  # as if requests were open
        raise KeyboardInterrupt
    assert server.poll() == -signal.SIGKILL
    assert not server.directory.exists()
