"""What all tests share: a stand-in for Triton's module, profiles of hypothesis, running servers.

Triton's module for Python models exists inside its stub only; tests get a strict fake.

``HYPOTHESIS_PROFILE=nightly`` multiplies the examples of every property by 50. The default run is
the same each time; the nightly one draws anew and prints what reproduces a failure. ``make fuzz``
runs under ``fuzz`` again and again, and keeps what failed (see ``properties/corpus``).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import xdist.remote
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

import minisgl_kit as minisgl_kit  # what it sets must come before gRPC
from minisgl_backend.errors import ConfigError
from minisgl_backend.server.process import TritonServer
from minisgl_bench.perf_analyzer_binary import find_perf_analyzer
from tests.fakes import pb_utils
from tests.server.conftest import paced_repository, running

_SHARING: Final = "tests/gateway/"
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
# what tests start, hundreds of processes, need not compile the same modules each
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# before any test is read: a property takes the profile of that moment
for name, kind in {
    "default": settings(max_examples=100, derandomize=True),
    "nightly": settings(max_examples=5000, print_blob=True),
    "fuzz": settings(max_examples=1000, print_blob=True),
}.items():
    settings.register_profile(
        name, kind, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


class _ByFileScheduling(LoadFileScheduling):  # type: ignore[misc]  # it has no types
    """Gives each worker a file at a time, but all of the gateway's to one: else each would start
    the five servers that these files share."""

    def _split_scope(self, nodeid: str) -> str:
        return _SHARING if nodeid.startswith(_SHARING) else str(super()._split_scope(nodeid))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Random tensors of a test do not depend on those that ran before it in the same worker."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(
    config: pytest.Config, log: xdist.remote.Producer
) -> LoadFileScheduling | None:
    """Replaces ``--dist loadfile``."""
    return _ByFileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def server() -> Iterator[TritonServer]:
    """A server with the demo model."""
    with running() as server:
        yield server


@pytest.fixture(scope="session")
def paced_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server whose engine takes 20 ms a step, two requests and 16 prompt tokens at a time.

    One more request may wait. Requests may be so long that none ends before a test leaves it.
    """
    repository = paced_repository(tmp_path_factory.mktemp("paced"))
    limits = {"max_running_requests": "2", "max_queued_requests": "1", "max_prefill_tokens": "16"}
    limits["max_sequence_length"] = "65536"
    # many a stream is cancelled here, and 24.10 leaks one whose end the cancel meets
    with running(repository, options=limits, exit_code=None) as server:
        yield server
        server.signal(signal.SIGKILL)


@pytest.fixture(scope="session")
def perf_analyzer_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of tritonclient with perf_analyzer in it, fetched once into the user's cache.

    Skips where it cannot be had, or perf_analyzer does not run here.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minisgl"
    cache.mkdir(parents=True, exist_ok=True)
    wheel = cache / "tritonclient-2.51.0-py3-none-manylinux1_x86_64.whl"
    if not wheel.exists():
        # in a folder of its own, since another worker may do the same
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--only-binary=:all:", "--platform", "manylinux1_x86_64", "--dest", folder]
            done = subprocess.run(
                [*command, "tritonclient==2.51.0"], capture_output=True, text=True, timeout=200
            )
            if done.returncode:
                last = (done.stderr.strip() or "no reason").splitlines()[-1]
                pytest.skip(f"perf_analyzer cannot be fetched: {last}")
            (fetched,) = Path(folder).glob("*.whl")
            fetched.replace(wheel)
    try:
        find_perf_analyzer(tmp_path_factory.mktemp("perf_analyzer"), binary=None, wheel=wheel)
    except ConfigError as error:
        pytest.skip(str(error))
    return wheel
