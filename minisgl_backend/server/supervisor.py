"""Keeps a server serving: notices that a process of it died or hangs, and recovers.

Knows the server, the processes of its models, and Triton's habits. Must not know requests.

A model's process that died or hangs is ended for good, and the model loaded again, while the others
serve on. But requests that were inside the process are lost to Triton 24.10: it neither ends them
nor could be told to, so their callers would wait for ever. Where there were any, and where
tritonserver itself is at fault, all of it is ended and started again on the same ports: callers see
their connections break at once. (The detokenizer has no request inside: the engine ends the streams
of one that has gone.) So it is where more requests wait in tritonserver for a model that died than
are served beside them: Triton 24.10 ends those with an error, but one a second, also when the model
is back. And after ``MAX_RELOADS``, of each of which under load tritonserver keeps some threads.

A recovery that fails is a fault like any other. Each one waits twice as long as the last; after
``MAX_RECOVERIES`` in ``WINDOW_S`` the server stays down, and says so, until the operator stops it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from minisgl_backend.errors import ConfigError, EngineFailure
from minisgl_backend.heartbeat import State, read_beat
from minisgl_backend.server.model_processes import (
    ModelProcess,
    ModelProcesses,
    counts_of,
    footprint,
)
from minisgl_backend.server.options import ServerOptions
from minisgl_backend.server.process import RECOVERING_FILE, StuckStart, TritonServer
from minisgl_backend.server.recoveries import MAX_RECOVERIES, WINDOW_S, Recoveries

logger = logging.getLogger(__name__)

HANG_AFTER_S: Final = 7.0
"""Silence that is no pause any more. Longer than any pause of a healthy process, by far: a loop is
not silent while it waits for its device, and a page is touched four times a second."""
TRITON_HANG_AFTER_S: Final = 20.0
"""The same for tritonserver, which is asked over HTTP and may be late on an overloaded machine."""
MAX_RELOADS: Final = 20
"""Of models, in one life of tritonserver."""
FEW_WAIT: Final = 8
"""Requests that may be ended one a second."""
_LOOK_EVERY_S: Final = 0.1
_ASK_EVERY_S: Final = 1.0
"""How often tritonserver itself is asked whether it is ready."""
_RELOAD_S: Final = 120.0
"""The least patience with the load of one model; three times what all of them took is the most."""


class Phase(Enum):
    """What the supervisor is doing."""

    STARTING = "starting"
    SERVING = "serving"
    RECOVERING = "recovering"
    STOPPING = "stopping"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Health:
    """``live`` while there is hope, ``ready`` while requests are served; ``reasons`` if not."""

    live: bool
    ready: bool
    phase: Phase
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Fault:
    """What went wrong; ``process`` is None where it is tritonserver itself."""

    what: str
    process: ModelProcess | None = None


class Supervisor:
    """Owns a server from its start to its end. ``run`` belongs to one thread, the rest to any."""

    def __init__(
        self,
        start: Callable[[ServerOptions], TritonServer],
        options: ServerOptions,
        *,
        first_pause_s: float = 1.0,
    ) -> None:
        """``start`` starts a server, without waiting for it; raises ``ConfigError``.

        ``first_pause_s`` is that of ``Recoveries``.
        """
        self._start = start
        self._phase = Phase.STARTING
        self._reasons: tuple[str, ...] = ("the models are being loaded",)
        self._looked_s = time.monotonic()
        self._recoveries = Recoveries(first_pause_s)
        self._num_reloads = 0
        self._load_s = 0.0
        self._seen: tuple[ModelProcess, ...] = ()
        self._asked_s = self._answered_s = float("-inf")
        self._triton_is_ready = False
        self.server = start(options)
        self._processes = ModelProcesses(self.server.directory)

    def run(
        self, stopping: threading.Event, on_ready: Callable[[TritonServer], None] = lambda _: None
    ) -> None:
        """Serve until ``stopping`` is set, or the server was told to end by somebody else.

        Raises ``ConfigError`` where the first load fails, ``EngineFailure`` where it was given up.
        """
        try:
            try:
                self._wait_ready(stopping)
                self._serves()
            except StuckStart as error:
                self._recover(_Fault(str(error)), stopping)
            if self._phase is Phase.SERVING:
                on_ready(self.server)
                self._watch(stopping)
        except InterruptedError:  # stopped while it was starting
            pass
        finally:
            was_down = self._phase is Phase.DOWN
            self._phase = Phase.STOPPING
            self._processes.close()
            self.server.stop()
        if was_down:
            raise EngineFailure(self._reasons[0])

    def health(self) -> Health:
        """How the server is, by the last look at it."""
        phase, reasons = self._phase, self._reasons
        if phase is Phase.SERVING and time.monotonic() - self._looked_s > HANG_AFTER_S:
            reasons = (*reasons, "nobody has looked after the server for too long")
        return Health(
            live=phase is not Phase.DOWN,
            ready=phase is Phase.SERVING and not reasons,
            phase=phase,
            reasons=reasons,
        )

    def stats(self) -> Mapping[str, Any]:
        """Counts of the server and of its models, each asked now; for operators and tests."""
        server = self.server
        models = []
        for process in self._seen:
            beat = read_beat(process.page) or process.beat
            counts: Mapping[str, Any]
            try:
                counts = counts_of(server.directory, process)
            except (OSError, ValueError):
                counts = {"error": "does not answer"}
            models.append(
                {
                    "model": process.model,
                    "pid": process.pid,
                    "age_s": process.age_s,
                    "num_inside": beat.num_inside,
                    "num_seen": beat.num_seen,
                    **footprint(process.pid),
                    **counts,
                }
            )
        return {
            "phase": self._phase.value,
            "num_recoveries": self._recoveries.num_begun,
            "shared_memory_bytes": sum(map(_num_bytes, server.shared_memory_regions())),
            "tritonserver": {"pid": server.pid, **footprint(server.pid)},
            "models": models,
        }

    def _wait_ready(self, stopping: threading.Event) -> None:
        started_s = time.monotonic()
        self.server.wait_ready(give_up=stopping.is_set)
        self._load_s = time.monotonic() - started_s

    # --- looking -----------------------------------------------------------------------------

    def _serves(self) -> None:
        self._seen = tuple(self._processes.look())
        self._reasons = ()
        self._answered_s = self._looked_s = time.monotonic()
        self._triton_is_ready = True
        self._phase = Phase.SERVING

    def _watch(self, stopping: threading.Event) -> None:
        while not stopping.wait(_LOOK_EVERY_S):
            code = self.server.poll()
            if code == 0:
                raise EngineFailure("tritonserver was told to end by somebody else")
            fault = self._look()
            if fault is not None:
                self._recover(fault, stopping)

    def _look(self) -> _Fault | None:
        """Update what is known of the server; what is wrong with it, if that needs mending."""
        self._seen = tuple(self._processes.look())
        self._ask_triton()
        fault = self._find_fault()
        serving = {process.model for process in self._seen if process.beat.state is State.SERVING}
        missing = [f"{m}: not loaded" for m in sorted(self.server.model_names() - serving)]
        if fault is not None:
            missing.insert(0, fault.what)
        elif not self._triton_is_ready and not missing:
            missing.append("tritonserver says that it is not ready")
        self._reasons = tuple(missing)
        self._looked_s = time.monotonic()
        return fault

    def _ask_triton(self) -> None:
        now_s = time.monotonic()
        if now_s - self._asked_s >= _ASK_EVERY_S:
            self._asked_s = now_s
            answer = self.server.is_ready(timeout_s=_ASK_EVERY_S)
            if answer is not None:  # silence is no answer on a busy machine, until it is a hang
                self._triton_is_ready = answer
                self._answered_s = time.monotonic()

    def _find_fault(self) -> _Fault | None:
        code = self.server.poll()
        if code is not None:
            return _Fault(f"tritonserver ended with code {code}")
        now_s = time.monotonic()
        for process in self._seen:
            name = f"{process.model} (process {process.pid})"
            silent_s = process.beat.silent_s(now_s)
            if not process.is_alive:
                return _Fault(f"{name} ended unexpectedly", process)
            if process.beat.state is State.BROKEN:
                return _Fault(f"{name} broke", process)
            if silent_s > HANG_AFTER_S:
                return _Fault(f"{name} hangs: silent for {silent_s:.1f} s", process)
        if now_s - self._answered_s > TRITON_HANG_AFTER_S:
            return _Fault("tritonserver hangs: it does not answer over HTTP")
        return None

    # --- recovering --------------------------------------------------------------------------

    def _recover(self, fault: _Fault | None, stopping: threading.Event) -> None:
        self._phase = Phase.RECOVERING
        started_s = time.monotonic()
        while fault is not None:
            logger.error("%s", fault.what)
            self._reasons = (fault.what,)
            pause_s = self._recoveries.begin()
            if pause_s is None:
                self._give_up(fault, stopping)
                return
            model = self._end(fault)
            if stopping.wait(pause_s):
                return
            fault = self._mend(model, stopping)
        logger.info("serving again after %.1f s", time.monotonic() - started_s)
        self._phase = Phase.SERVING

    def _end(self, fault: _Fault) -> str | None:
        """End what is at fault, so that its callers learn of it before any pause.

        Returns the model to load again; None where all is to be started again, and has ended.
        """
        process = fault.process
        if process is not None:
            with suppress(OSError):  # a full disk
                self._sign.touch()
            beat = self._processes.end(process)
            why: str | None
            if beat.num_inside:
                why = f"{beat.num_inside} requests are lost with it"
            elif self._num_reloads == MAX_RELOADS:
                why = f"models were loaded again {MAX_RELOADS} times"
            else:
                why = self._who_waits(process.model)
            if why is None:
                return process.model
            logger.warning("%s: starting again", why)
        self.server.kill()
        return None

    def _mend(self, model: str | None, stopping: threading.Event) -> _Fault | None:
        """Load ``model`` again, or start all again; what is wrong then, if anything."""
        try:
            if model is not None:
                self._reload(model)
                why = self._who_waits(model)
                if why is not None:
                    logger.warning("%s: starting again", why)
                    model = None
            if model is None:
                self._restart(stopping)
        except ConfigError as error:
            return _Fault(f"recovery failed: {error}")
        self._answered_s = time.monotonic()
        return self._look()

    @property
    def _sign(self) -> Path:
        """While it is there, the tokenizer refuses requests at once."""
        return self.server.directory / RECOVERING_FILE

    def _who_waits(self, model: str) -> str | None:
        """Too many for a process that has gone, more than are served elsewhere; None where not."""
        num_waiting = self.server.num_waiting(model)
        others = (p.beat.num_inside for p in self._processes.look() if p.model != model)
        if num_waiting <= max(FEW_WAIT, *others):
            return None
        return f"{num_waiting} requests wait for the {model} that has gone"

    def _reload(self, model: str) -> None:
        self._num_reloads += 1
        self.server.reload(model, timeout_s=max(_RELOAD_S, 3 * self._load_s))
        self._sign.unlink(missing_ok=True)

    def _restart(self, stopping: threading.Event) -> None:
        old = self.server
        old.kill()
        self._processes.close()
        self._num_reloads = 0
        self.server = self._start(old.options)  # with the ports that it had
        self._processes = ModelProcesses(self.server.directory)
        self._wait_ready(stopping)

    def _give_up(self, fault: _Fault, stopping: threading.Event) -> None:
        reason = (
            f"given up after {MAX_RECOVERIES} recoveries in {WINDOW_S / 60:g} minutes: {fault.what}"
        )
        logger.critical("%s", reason)
        self._reasons = (reason,)
        self._phase = Phase.DOWN
        self.server.kill()
        stopping.wait()


def _num_bytes(region: Path) -> int:
    """Of a file that may vanish at any time."""
    try:
        return region.stat().st_size
    except FileNotFoundError:
        return 0
