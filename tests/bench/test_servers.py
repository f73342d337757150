"""The servers that benchmarks start, with a fake binary."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from minisgl_backend.runtime_files import QUEUE_OPEN
from minisgl_backend.server.process import BrokenStart
from minisgl_bench.servers import started, started_paced
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


def test_a_crash_in_the_start_is_tried_once_more(tmp_path: Path) -> None:
    crashed = tmp_path / "crashed"
    crash_once = f"""
    if not os.path.exists({str(crashed)!r}):
        open({str(crashed)!r}, "w").close()
        os.kill(os.getpid(), signal.SIGABRT)
    """
    binary = str(fake_server(tmp_path, crash_once).binary)
    with started({}, tritonserver=binary) as server:
        assert crashed.exists() and server.poll() is None
    assert not server.directory.exists()


def test_two_crashes_in_the_start_are_an_error(tmp_path: Path) -> None:
    binary = str(fake_server(tmp_path, "os.kill(os.getpid(), signal.SIGABRT)").binary)
    with pytest.raises(BrokenStart, match="ended with code -6"), started({}, tritonserver=binary):
        pass
