"""One running tritonserver: started, waited for, stopped, and cleaned up after.

Knows processes, ports, files and the server's log. Must not know models or requests.

Invariants: what the server needs lies in one private directory of mode 0700, which is gone when
``stop`` returns, as are the server's processes and its shared memory. Should this process die
without ``stop``, the kernel kills the server, whose processes then end too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Final

from minisgl_backend.errors import ConfigError, NotNow
from minisgl_backend.runtime_files import (
    DRAIN_MARKER,
    QUEUE_FULL,
    QUEUE_OPEN,
    State,
    heartbeat_files,
    read_adapters,
    read_beat,
    write_adapters,
)
from minisgl_backend.server import triton_http
from minisgl_backend.server.directory import (
    is_for_want_of_room,
    make_directory,
    regions,
    remove_regions,
    sweep,
)
from minisgl_backend.server.installation import Installation
from minisgl_backend.server.launch import ServerOptions, launch
from minisgl_backend.server.log import failure_in_log, load_failure
from minisgl_backend.server.ports import with_ports
from minisgl_backend.server.progress import STUCK_AFTER_S, Progress
from minisgl_backend.server.repository import copy_repository, with_plain_folders

logger = logging.getLogger(__name__)

START_S: Final = 1800.0
"""How long a start, or a load that waits for other machines, may take."""
_FLUSH_S: Final = 0.5
"""How long tritonserver has, once the engines have drained, to send what it has buffered."""
_KEPT_LOG_LINES: Final = 2000


class BrokenStart(ConfigError):
    """A start that hangs or crashes, for a reason that the operator cannot fix."""


class TritonServer:
    """A tritonserver over a private copy of a model repository.

    ``on_log`` gets each line of the server's log, on a thread of its own. Making one raises
    ``ConfigError`` if tritonserver cannot be started, ``NotNow`` if it may be later.
    """

    def __init__(
        self,
        installation: Installation,
        repository: Path,
        engine_options: Mapping[str, str],
        options: ServerOptions,
        *,
        on_log: Callable[[str], None] | None = None,
    ) -> None:
        self.shared_memory_prefix = f"minisgl-{os.getpid()}-{secrets.token_hex(4)}-"
        self.admin_key = secrets.token_urlsafe(24)
        self.log: deque[str] = deque(maxlen=_KEPT_LOG_LINES)
        self._on_log = on_log
        self.waits_for_nodes = int(engine_options.get("nnodes") or 1) > 1
        """Whether a load may wait for other machines, without any activity."""
        self._adapters = options.adapters
        self._was_ready = False
        self._load_failure: str | None = None
        self._stopped_with: int | None = None
        with contextlib.ExitStack() as undo:
            self._held_ports = undo.enter_context(contextlib.ExitStack())
            self.options = with_ports(options, self._held_ports)
            for left in sweep():
                logger.info("removed %s, left by a server that was killed", left)
            self.directory, self._locks = make_directory(self.shared_memory_prefix)
            undo.callback(self._remove_files)
            self._process = self._launch(installation, repository, engine_options)
            undo.pop_all()
        self._log_thread = threading.Thread(
            target=self._read_log, args=(self._process.stdout,), name="server log", daemon=True
        )
        self._log_thread.start()

    def _launch(
        self, installation: Installation, repository: Path, engine_options: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        try:
            if self.options.adapters is not None:
                write_adapters(self.directory, self.options.adapters)
            options = with_plain_folders(engine_options, self.directory)
            copy_repository(repository, self.repository, options)
            return launch(
                installation,
                self.options,
                directory=self.directory,
                repository=self.repository,
                shared_memory_prefix=self.shared_memory_prefix,
                admin_key=self.admin_key,
                url=self.url(),
                locks=self._locks,
            )
        except OSError as error:  # a full disk, or a file that is not a program
            kind = NotNow if is_for_want_of_room(error) else ConfigError
            raise kind(f"tritonserver cannot be started: {error}") from None

    @property
    def pid(self) -> int:
        """The process id of tritonserver."""
        return self._process.pid

    @property
    def http_port(self) -> int:
        """The port for HTTP."""
        return self.options.http_port

    @property
    def grpc_port(self) -> int:
        """The port for gRPC."""
        return self.options.grpc_port

    @property
    def grpc_address(self) -> str:
        """HOST:PORT for gRPC from this machine."""
        return self.options.address(self.grpc_port)

    @property
    def metrics_port(self) -> int:
        """The port for metrics."""
        return self.options.metrics_port

    @property
    def repository(self) -> Path:
        """The private copy that the server reads."""
        return self.directory / "model_repository"

    def model_names(self) -> set[str]:
        """The models with processes: all but the ensembles."""
        return {path.parent.parent.name for path in self.repository.glob("*/*/model.py")}

    def url(self, path: str = "", *, port: int | None = None) -> str:
        """The address of ``path`` over HTTP, or on another port."""
        return f"http://{self.options.address(port or self.http_port)}{path}"

    def wait_ready(
        self, timeout_s: float = START_S, *, give_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Return when every model is ready.

        Raises ``ConfigError`` with the cause if a model fails to load, or the server ends or does
        not come up in time, ``BrokenStart`` if a signal ended it or its processes are stuck, and
        ``InterruptedError`` once ``give_up`` returns True.
        """
        deadline = time.monotonic() + timeout_s
        progress = Progress(self.pid, self._loaded)
        while not self.is_ready(timeout_s=1):
            if give_up():
                raise InterruptedError
            code = self._process.poll()
            if code is not None:
                self._log_thread.join(timeout=10)
                raise (BrokenStart if code < 0 else ConfigError)(self.failure())
            if self._load_failure is not None:  # tritonserver first loads and unloads the others
                raise ConfigError(self._load_failure)
            if time.monotonic() > deadline:
                raise ConfigError(f"tritonserver was not ready after {timeout_s:g} s")
            if not self.waits_for_nodes and progress.stuck_s() > STUCK_AFTER_S:
                raise BrokenStart(self._stuck())
            time.sleep(0.05)
        self._was_ready = True
        self._held_ports.close()  # the server has them
        self._protect_shared_memory()

    def is_ready(self, *, timeout_s: float) -> bool | None:
        """Whether Triton says that it is ready; None if it does not answer in time."""
        return triton_http.is_ready(self.url(), timeout_s=timeout_s)

    def reload(self, model: str, *, timeout_s: float, check: Callable[[], None]) -> None:
        """Load a model again, and with it the ensembles that it is part of.

        ``check`` is called repeatedly until the model is loaded. Raises ``ConfigError`` if that
        fails, and whatever ``check`` raises.
        """
        for source in self.repository.glob(f"{model}/*/model.py"):
            source.touch()  # Triton does not reload a model whose files are unchanged
        triton_http.load_model(
            self.url(), model, self.admin_key, pid=self.pid, timeout_s=timeout_s, check=check
        )
        self._protect_shared_memory()

    def num_waiting(self, model: str) -> int:
        """Number of requests that wait inside tritonserver for a model, if it answers, else 0."""
        return triton_http.num_waiting(self.url("/metrics", port=self.metrics_port), model)

    def num_failed(self, *, timeout_s: float) -> int | None:
        """Number of requests to its ensembles that have failed; None if it does not answer."""
        ensembles = {path.parent.name for path in self.repository.glob("*/config.pbtxt")}
        return triton_http.num_failed(
            self.url("/metrics", port=self.metrics_port),
            ensembles - self.model_names(),
            timeout_s=timeout_s,
        )

    def failure(self) -> str:
        """Why the server did not start, from its log."""
        return failure_in_log(self.log) or (
            f"tritonserver ended with code {self._process.poll()}:\n"
            + "\n".join(list(self.log)[-15:])
        )

    def _loaded(self) -> set[int]:
        """The processes that have loaded their models."""
        beats = [read_beat(path) for _, path in heartbeat_files(self.directory)]
        return {beat.pid for beat in beats if beat is not None}

    def _stuck(self) -> str:
        missing = self.model_names() - {model for model, _ in heartbeat_files(self.directory)}
        waits_for = ", ".join(sorted(missing)) or "none of its models"
        return (
            f"tritonserver hangs in its start: for {STUCK_AFTER_S:g} s none of its processes did "
            f"anything; it waits for {waits_for}"
        )

    def poll(self) -> int | None:
        """The exit code, or None while the server runs."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the server to end; returns its exit code. Raises ``TimeoutError``."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"tritonserver still runs after {timeout_s:g} s") from None

    def signal(self, number: int) -> None:
        """Send a signal to the server itself, not to its models."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def stop(self) -> int:
        """Let requests drain, end the server and its processes, remove its files. Idempotent.

        Returns the server's exit code, 0 if all requests were answered.
        """
        if self._stopped_with is None:  # else its process id may be another's by now
            self._stopped_with = self._stop()
        return self._stopped_with

    def _stop(self) -> int:
        self._held_ports.close()
        drained = self._drain()
        if self._was_ready:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                self.wait(_FLUSH_S)
        # All that is left is to unload the models, which waits until a running step ends. 24.10
        # waits forever if a gRPC stream was cancelled after all its responses were sent.
        self.signal(signal.SIGKILL)
        code = self._process.wait()
        if drained and code == -signal.SIGKILL:
            code = 0
        with contextlib.suppress(ProcessLookupError):  # stubs that outlived their server
            os.killpg(self._process.pid, signal.SIGKILL)
        self._log_thread.join(timeout=10)
        self._adapters = self.adapters()
        self._remove_files()
        return code

    def _remove_files(self) -> None:
        """Remove the directory and the shared memory, and let go of their locks."""
        remove_regions(self.shared_memory_prefix)
        shutil.rmtree(self.directory, ignore_errors=True)
        for lock in self._locks:
            os.close(lock)

    def adapters(self) -> Mapping[str, str] | None:
        """The paths of the adapters that the engine knows, or knew last, by name; None if they are
        still those of its options."""
        known = read_adapters(self.directory)
        return self._adapters if known is None else known

    def kill(self) -> None:
        """End the server and its processes at once, and remove its files."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        self.stop()

    def _drain(self) -> bool:
        """Wait until the engines have answered their requests; False if they have not in time.

        Afterwards a step may still run, for requests that were cancelled. This is necessary because
        tritonserver, when it stops, first unloads the models without a request at that instant,
        such as the detokenizer between two packets, which leaves the requests of others hanging.
        """
        if not self._was_ready or self._process.poll() is not None:
            return False
        deadline = time.monotonic() + self.options.exit_timeout_s
        try:
            (self.directory / DRAIN_MARKER).touch()
        except OSError as error:  # a full disk, or the directory was removed
            logger.warning("the engine cannot be asked to drain: %s", error)
            return False
        while self._process.poll() is None and self._serves():
            if time.monotonic() > deadline:
                logger.warning("the engine did not drain in time")
                return False
            time.sleep(0.05)
        return True

    def _serves(self) -> bool:
        """Whether requests may be open: an engine's marker is there, and the engine is not idle."""
        names = (QUEUE_OPEN, QUEUE_FULL)
        if not any(path.name.startswith(names) for path in self.directory.glob("*")):
            return False
        read = [read_beat(path) for _, path in heartbeat_files(self.directory)]
        beats = [beat for beat in read if beat is not None]
        has_ended = any(beat.state is State.ENDING for beat in beats)
        return not has_ended or any(beat.num_inside for beat in beats)

    def shared_memory_regions(self) -> list[Path]:
        """The files of the server's shared memory."""
        return regions(self.shared_memory_prefix)

    def _read_log(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                text = line.rstrip("\n")
                self.log.append(text)
                self._load_failure = self._load_failure or load_failure(text)
                if self._on_log is not None:
                    self._on_log(text)

    def _protect_shared_memory(self) -> None:
        """Restrict the files of shared memory, through which prompts pass, to this user; the
        backend makes them readable for everyone."""
        for region in self.shared_memory_regions():
            with contextlib.suppress(FileNotFoundError):
                region.chmod(0o600)
