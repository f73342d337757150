"""Keeps a server serving: notices that one of its processes has died or hangs, and recovers.

Knows the server, its faults (``faults``), and Triton's behaviour. Must not know requests.

A model's process that has died or hangs is killed, and the model is reloaded, while the others keep
serving. But all of tritonserver is restarted, on the same ports, if

- requests were inside such a process: Triton 24.10 does not end them, and cannot be made to, so
  their callers would wait forever. With a restart their connections break at once;
- streams were lost with the detokenizer, and their callers have no error half a second later: the
  engine ends these streams, but releases after 24.10 may hold back its errors;
- tritonserver itself is at fault, or does not answer requests;
- more requests wait in tritonserver for a dead model than are inside any other: Triton 24.10 ends
  waiting ones with an error, but only one a second, even when the model is back;
- models were reloaded ``MAX_RELOADS`` times: under load, each reload leaks threads in tritonserver.

Faults that occur together take one recovery. A recovery that fails is a fault like any other. Each
recovery waits twice as long as the previous one. After ``MAX_RECOVERIES`` in ``WINDOW_S`` the
server is given up, and the process ends, so that whoever starts processes again can.

A full disk or a port that is taken (``NotNow``), which keeps tritonserver from being started, is no
fault of the server: the same recovery tries again until it goes away.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final

from minisgl_backend.errors import ConfigError, EngineFailure, NotNow
from minisgl_backend.runtime_files import DETOKENIZER, RECOVERING_MARKER
from minisgl_backend.server.faults import HANG_AFTER_S, Fault, FaultDetector
from minisgl_backend.server.launch import ServerOptions
from minisgl_backend.server.process import START_S, BrokenStart, TritonServer
from minisgl_backend.server.stats import server_stats
from minisgl_backend.server.stop_event import StopEvent

logger = logging.getLogger(__name__)

MAX_RELOADS: Final = 20
"""After this many reloads of models, tritonserver is restarted."""
FEW_WAIT: Final = 8
"""If no more requests wait than this, tritonserver may end them, one a second, without a restart.
"""
MAX_RECOVERIES: Final = 5
WINDOW_S: Final = 600.0
"""After ``MAX_RECOVERIES`` within this time, a server is given up."""
_LONGEST_PAUSE_S: Final = 30.0
"""Between tries to start tritonserver while something keeps it from being started."""
_LOOK_EVERY_S: Final = 0.1
_LOADING: Final = ("the models are being loaded",)
RELOAD_S: Final = 30.0
"""How long a reload of one model may take, in addition to twice the time that the start of all
models took. On a busy machine, loads of 4 s were seen to take 20 s."""


class Phase(Enum):
    """What the supervisor is doing."""

    STARTING = "starting"
    SERVING = "serving"
    RECOVERING = "recovering"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class Health:
    """``ready`` while the server serves requests, else there are ``reasons``."""

    ready: bool
    phase: Phase
    reasons: tuple[str, ...] = ()


class Recoveries:
    """The recoveries of the last ``WINDOW_S`` seconds; ``num_begun`` counts all since the start."""

    def __init__(self, first_pause_s: float) -> None:
        """``first_pause_s`` is the pause before the second recovery of a window; the first has
        none."""
        self.num_begun = 0
        self._first_pause_s = first_pause_s
        self._begun_s: deque[float] = deque()

    def begin(self) -> float | None:
        """Begin a recovery. Returns the seconds to wait first, or None if there were too many."""
        now_s = time.monotonic()
        while self._begun_s and now_s - self._begun_s[0] > WINDOW_S:
            self._begun_s.popleft()
        num_before = len(self._begun_s)
        if num_before == MAX_RECOVERIES:
            return None
        self._begun_s.append(now_s)
        self.num_begun += 1
        return self._first_pause_s * 2 ** (num_before - 1) if num_before else 0.0


class Supervisor:
    """Owns a server from its start to its end. ``run`` belongs to one thread, the rest to any."""

    def __init__(
        self,
        start: Callable[[ServerOptions], TritonServer],
        options: ServerOptions,
        *,
        first_pause_s: float = 1.0,
    ) -> None:
        """``start`` starts a server, without waiting for it; raises ``ConfigError``, of which
        ``NotNow`` may pass.

        ``first_pause_s`` is that of ``Recoveries``, and of tries within a recovery.
        """
        self._start = start
        self._phase = Phase.STARTING
        self._reasons: tuple[str, ...] = _LOADING
        self._recoveries = Recoveries(first_pause_s)
        self._first_pause_s = first_pause_s
        self._num_reloads = 0
        self._load_s = 0.0
        self.server = start(options)
        self._detector = FaultDetector(self.server)

    def run(
        self, stopping: StopEvent, on_ready: Callable[[TritonServer], None] = lambda _: None
    ) -> None:
        """Serve until ``stopping`` is set, or another process tells the server to end.

        Raises ``ConfigError`` if the first load fails, ``EngineFailure`` if the server is given up.
        """
        try:
            try:
                self._wait_ready(stopping)
                self._serves()
            except BrokenStart as error:
                self._recover(Fault(str(error)), stopping)
            if self._phase is Phase.SERVING:
                on_ready(self.server)
                self._watch(stopping)
        except InterruptedError:  # stopped while it was starting
            pass
        finally:
            self._phase = Phase.STOPPING
            self._detector.close()
            self.server.stop()

    def health(self) -> Health:
        """The state of the server at the last look."""
        phase, reasons = self._phase, self._reasons
        if phase is Phase.SERVING:
            reasons = self._detector.missing
            if time.monotonic() - self._detector.looked_s > HANG_AFTER_S:
                reasons = (*reasons, "the supervisor has not checked the server for too long")
        return Health(
            ready=phase is Phase.SERVING and not reasons,
            phase=phase,
            reasons=reasons,
        )

    def stats(self) -> Mapping[str, Any]:
        """Current counts of the server and its models; for operators and tests."""
        return {
            "phase": self._phase.value,
            "num_recoveries": self._recoveries.num_begun,
            **server_stats(self.server, self._detector.seen),
        }

    def _wait_ready(self, stopping: StopEvent) -> None:
        started_s = time.monotonic()
        self.server.wait_ready(give_up=stopping.is_set)
        self._load_s = time.monotonic() - started_s
        self._detector.serves()

    def _serves(self) -> None:
        self._reasons = ()  # the detector has them now
        self._phase = Phase.SERVING

    def _watch(self, stopping: StopEvent) -> None:
        while not stopping.wait(_LOOK_EVERY_S):
            fault = self._detector.look()
            if self.server.poll() == 0:  # polled after the look, which may have seen the same end
                raise EngineFailure("tritonserver was told to end by another process")
            if fault is not None:
                self._recover(fault, stopping)

    # --- recovering --------------------------------------------------------------------------

    def _recover(self, first: Fault, stopping: StopEvent) -> None:
        self._reasons = (first.what,)
        self._phase = Phase.RECOVERING
        started_s = time.monotonic()
        mended: frozenset[str] = frozenset()
        fault: Fault | None = first
        while fault is not None:
            logger.error("%s", fault.what)
            self._reasons = (fault.what,)
            pause_s: float | None = 0.0
            if not mended or not fault.models or fault.models & mended:
                pause_s = self._recoveries.begin()
                mended = frozenset()
            # else models other than those just loaded: probably killed by what killed the first
            if pause_s is None:
                self.server.kill()
                raise EngineFailure(
                    f"given up after {MAX_RECOVERIES} recoveries in {WINDOW_S / 60:g} minutes: "
                    f"{fault.what}"
                )
            reloads = self._end(fault)
            if stopping.wait(pause_s):
                return
            mended = mended | reloads if reloads else frozenset()
            fault = self._mend(reloads, stopping)
        logger.info("serving again after %.1f s", time.monotonic() - started_s)
        self._serves()

    def _end(self, fault: Fault) -> frozenset[str]:
        """End what is at fault, so that its callers learn of it before any pause.

        Returns the models to reload; none if tritonserver was ended and must be restarted.
        """
        if fault.processes:
            with suppress(OSError):  # a full disk
                self._recovering_marker.touch()
            ended = {process: self._detector.processes.end(process) for process in fault.processes}
            num_lost = sum(
                beat.num_inside for process, beat in ended.items() if process.model != DETOKENIZER
            )
            why: str | None
            if num_lost:
                why = f"{num_lost} requests are lost with it"
            elif DETOKENIZER in fault.models and not self._detector.are_callers_told():
                why = "streams are lost with it, and tritonserver does not tell their callers"
            elif self._num_reloads + len(fault.models) > MAX_RELOADS:
                why = f"models were loaded again {self._num_reloads} times"
            else:
                why = self._who_waits(fault.models)
            if why is None:
                return fault.models
            logger.warning("%s: starting again", why)
        self.server.kill()
        return frozenset()

    def _mend(self, reloads: frozenset[str], stopping: StopEvent) -> Fault | None:
        """Reload these models, or restart tritonserver if there are none. Returns the next fault,
        if there is one."""
        try:
            for model in sorted(reloads):
                self._reload(model, stopping)
            self._recovering_marker.unlink(missing_ok=True)
            why = self._who_waits(reloads)
            if why is not None:
                logger.warning("%s: starting again", why)
            if why is not None or not reloads:
                self._restart(stopping)
        except ConfigError as error:
            return Fault(f"recovery failed: {error}")
        self._detector.has_answered()
        return self._detector.look()

    @property
    def _recovering_marker(self) -> Path:
        """While it is there, the tokenizer refuses requests at once."""
        return self.server.directory / RECOVERING_MARKER

    def _who_waits(self, models: frozenset[str]) -> str | None:
        """Why tritonserver should be restarted because of waiting requests; None if it should not.

        It should if more requests wait for a dead process than are inside any other.
        """
        for model in sorted(models):
            num_waiting = self.server.num_waiting(model)
            if num_waiting > max([FEW_WAIT, *self._detector.num_inside_others(model)]):
                return f"{num_waiting} requests wait for the {model} that has gone"
        return None

    def _reload(self, model: str, stopping: StopEvent) -> None:
        def check() -> None:
            if stopping.is_set():
                raise InterruptedError
            if self._detector.triton_hangs():
                raise ConfigError(f"{model}: tritonserver hangs while it loads it")

        self._num_reloads += 1
        patience_s = START_S if self.server.waits_for_nodes else RELOAD_S + 2 * self._load_s
        self.server.reload(model, timeout_s=patience_s, check=check)

    def _restart(self, stopping: StopEvent) -> None:
        old = self.server
        options = replace(old.options, adapters=old.adapters())  # with the ports that it had
        old.kill()
        self._detector.close()
        self._num_reloads = 0
        self._detector.seen = ()  # their process ids may be reused
        self.server = self._start_at_last(options, stopping)
        self._detector = FaultDetector(self.server)
        self._wait_ready(stopping)

    def _start_at_last(self, options: ServerOptions, stopping: StopEvent) -> TritonServer:
        """Start tritonserver as soon as it has room and its ports, however long that takes.

        Raises ``ConfigError`` if something else keeps it from being started,
        ``InterruptedError`` if it is stopped before.
        """
        pause_s = self._first_pause_s
        reason = None
        while True:
            try:
                server = self._start(options)
            except NotNow as error:
                reason = f"the recovery waits: {error}"
            else:
                if reason is not None:
                    self._reasons = _LOADING
                return server
            logger.error("%s", reason)
            self._reasons = (reason,)
            if stopping.wait(pause_s):
                raise InterruptedError
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
