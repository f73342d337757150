"""What all tests share: a stand-in for Triton's module, and two running servers.

Triton's module for Python models exists inside its stub only; tests get a strict fake.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from minisgl_backend.server.process import TritonServer
from tests.fakes import pb_utils
from tests.server.conftest import paced_repository, running

sys.modules["triton_python_backend_utils"] = pb_utils
# models this small are computed fastest by one thread, whatever else the machine does
os.environ.setdefault("OMP_NUM_THREADS", "1")
# a shell starts what runs in its background with Ctrl-C ignored, nohup with a terminal's end,
# and both would be passed on to what tests start
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# a worker of pytest-xdist says how wide it is, and terminals of tests would seem to be
os.environ.pop("COLUMNS", None)
os.environ.pop("LINES", None)


@pytest.fixture(scope="session")
def server() -> Iterator[TritonServer]:
    """A server with the demo model."""
    with running() as server:
        yield server


@pytest.fixture(scope="session")
def paced_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server whose engine takes 20 ms a step, two requests and 16 prompt tokens at a time.

    One more request may wait.
    """
    repository = paced_repository(tmp_path_factory.mktemp("paced"))
    limits = {"max_running_requests": "2", "max_queued_requests": "1", "max_prefill_tokens": "16"}
    # many a stream is cancelled here, and 24.10 leaks one whose end the cancel meets
    with running(repository, options=limits, exit_code=None) as server:
        yield server
        server.signal(signal.SIGKILL)
