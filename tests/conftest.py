"""What all tests share: a stand-in for Triton's module, Hypothesis profiles, running servers.

Triton's module for Python models exists only inside its stub; tests get a strict fake.

``HYPOTHESIS_PROFILE=nightly`` multiplies the examples of every property by 50. The default run is
the same each time; the nightly one draws new examples and prints how to reproduce a failure.
``make fuzz`` runs under ``fuzz`` again and again, and keeps what failed (see
``properties/corpus``).
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final, cast

import pytest
import xdist.remote
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

import minisgl_kit as minisgl_kit  # it sets what must be set before gRPC is imported
from minisgl_backend.errors import ConfigError
from minisgl_backend.server.process import TritonServer
from minisgl_bench.perf_analyzer_binary import find_perf_analyzer
from tests.fakes import pb_utils
from tests.server.conftest import paced_repository, running

_ROOT: Final = Path(__file__).parents[1]
_SHARING: Final = "tests/gateway/"
_MOST_SERVING: Final = 2
_NICENESS: Final = 5
sys.modules["triton_python_backend_utils"] = pb_utils
# models this small run fastest on one thread, whatever else the machine does
os.environ.setdefault("OMP_NUM_THREADS", "1")
# a shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP; processes that
# tests start would inherit both
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# pytest-xdist workers set a terminal size, which the terminals of tests would take for theirs
os.environ.pop("COLUMNS", None)
os.environ.pop("LINES", None)
# the hundreds of processes that tests start need not each compile the same modules
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# before any test is imported: a property takes the profile that is loaded at that moment
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
    """Gives each worker a file at a time, files that start servers to two workers only.

    More starts of tritonserver at once hang now and then. All gateway files that need servers go to
    one worker: otherwise each would start the five servers that these files share. They come first,
    since they take longest, and what needs no server comes last, since any worker can take it.
    """

    def __init__(self, config: pytest.Config, log: xdist.remote.Producer) -> None:
        super().__init__(config, log)
        self._serving: list[WorkerController] = []

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return _SHARING if file.startswith(_SHARING) and _serves(file) else file

    def _assign_work_unit(self, node: WorkerController) -> None:
        scope = self._next_for(node)
        if scope is not None:
            if _serves(scope) and node not in self._serving:
                self._serving.append(node)
            self.workqueue.move_to_end(scope, last=False)  # from where the next one is taken
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:
            return  # it replaces a worker that crashed, and has not collected its tests yet
        if self._next_for(node) is not None:
            super()._reschedule(node)
        elif not node.shutting_down:
            node.shutdown()

    def remove_node(self, node: WorkerController) -> str | None:
        if node in self._serving:
            self._serving.remove(node)
        return cast("str | None", super().remove_node(node))

    def _next_for(self, node: WorkerController) -> str | None:
        """The file that a worker gets next; None if there is none for it."""
        may_serve = node in self._serving or len(self._serving) < _MOST_SERVING
        scopes = [scope for scope in self.workqueue if may_serve or not _serves(scope)]
        return min(scopes, key=lambda it: (it != _SHARING, not _serves(it)), default=None)


@functools.cache
def _serves(scope: str) -> bool:
    """Whether a file has tests with the mark ``server``. All of its folder have it."""
    is_in_folder = scope == _SHARING or scope.startswith("tests/server/")
    return is_in_folder or "mark.server" in (_ROOT / scope).read_text("utf-8")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests for GPUs are not even read by who does not want them: there are thousands."""
    is_unwanted = "not gpu" in config.option.markexpr
    return True if is_unwanted and collection_path == Path(__file__).with_name("gpu") else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: it is not searched for garbage, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test's random tensors do not depend on which tests ran before it in the same worker.

    A worker that has come to files without servers leaves the processors to the others: a start of
    tritonserver fails if it gets none for a second.
    """
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if "PYTEST_XDIST_WORKER" in os.environ and not _serves(item.nodeid.split("::")[0]):
        os.nice(max(0, _NICENESS - os.nice(0)))


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
    """A server whose engine takes 20 ms per step, and two requests and 16 prompt tokens at a time.

    One more request may wait. Requests may be long enough that none ends before a test leaves it.
    """
    repository = paced_repository(tmp_path_factory.mktemp("paced"))
    limits = {"max_running_requests": "2", "max_queued_requests": "1", "max_prefill_tokens": "16"}
    limits["max_sequence_length"] = "65536"
    # many streams are cancelled here, and 24.10 leaks one if the cancel coincides with its end
    with running(repository, options=limits, exit_code=None) as server:
        yield server
        server.signal(signal.SIGKILL)


@pytest.fixture(scope="session")
def perf_analyzer_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of tritonclient with perf_analyzer in it, fetched once into the user's cache.

    Skips if it is not available, or if perf_analyzer does not run here.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minisgl"
    cache.mkdir(parents=True, exist_ok=True)
    wheel = cache / "tritonclient-2.51.0-py3-none-manylinux1_x86_64.whl"
    if not wheel.exists():
        # in its own folder, since another worker may do the same
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
