"""The faults of a server: processes that have died, hang or say that they are broken.

Knows the heartbeats of the models' processes. Asks tritonserver whether it is ready, how many
requests failed, and for a token if no request ends (``asking``). Must not know what is done about a
fault.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from minisgl_backend.runtime_files import OPTIONS_MODEL, State
from minisgl_backend.server.asking import Asker
from minisgl_backend.server.model_processes import ModelProcess, ModelProcesses, counts_of
from minisgl_backend.server.process import TritonServer

HANG_AFTER_S: Final = 7.0
"""Silence longer than this is a hang. No healthy process pauses for nearly as long: a loop is not
silent while it waits for its device, and a heartbeat is written four times a second."""
TRITON_HANG_AFTER_S: Final = 20.0
"""The same for tritonserver, which is asked over HTTP and may be late on an overloaded machine."""
_PAUSED_S: Final = 3.0
"""If more time passes between two looks, this process was paused, probably with the whole machine.
Then the others' silence in that time means nothing."""
_ASKED_WITHIN_S: Final = 2.0
"""The longest that the questions to tritonserver and to an engine take, answered or not."""
_ASK_EVERY_S: Final = 1.0
"""How often tritonserver itself is asked whether it is ready."""
_TOLD_WITHIN_S: Final = 0.5
"""How long Triton has to tell callers that their streams are lost."""
_TRITON_HANGS: Final = "tritonserver hangs: it does not answer over HTTP"


@dataclass(frozen=True, slots=True)
class Fault:
    """What went wrong, and the models' processes at fault: none if it is tritonserver."""

    what: str
    processes: tuple[ModelProcess, ...] = ()

    @property
    def models(self) -> frozenset[str]:
        """The models whose processes are at fault."""
        return frozenset(process.model for process in self.processes)


class RequestsSeen(NamedTuple):
    """Of all engines: how many requests they have seen, and whether any are inside."""

    num_seen: int
    are_inside: bool


class FaultDetector:
    """Checks one server. Belongs to one thread; any thread may read what it saw last."""

    def __init__(self, server: TritonServer) -> None:
        self.processes = ModelProcesses(server.directory)
        self.seen: tuple[ModelProcess, ...] = ()
        self.missing: tuple[str, ...] = ()
        """Why the server is not ready; empty if it is."""
        self.looked_s = time.monotonic()
        self._server = server
        self._asker = Asker(server)
        self._models = server.model_names()
        self._asked_s = self._answered_s = self._awake_since_s = float("-inf")
        self._triton_is_ready = False
        self._noted = RequestsSeen(-1, are_inside=False)
        self._failed_before = 0
        self._lost_before: dict[int, int] = {}

    def serves(self) -> None:
        """Note that the server is ready."""
        self.seen = tuple(self.processes.look())
        self.missing = ()
        self.looked_s = time.monotonic()
        self._triton_is_ready = True
        self._note_failures()
        self.has_answered()

    def has_answered(self) -> None:
        """Note that tritonserver has answered."""
        self._answered_s = time.monotonic()

    def look(self) -> Fault | None:
        """Note the state of the server; returns its fault, if there is one to recover from."""
        self._note_pause(_PAUSED_S)
        seen_s = time.monotonic()  # before reading beats, as this thread may be paused at any time
        self.seen = tuple(self.processes.look())
        self._ask_triton()
        self._note_pause(_PAUSED_S + _ASKED_WITHIN_S)
        fault = self._find_fault(seen_s)
        serving = {process.model for process in self.seen if process.beat.state is State.SERVING}
        missing = [f"{m}: not loaded" for m in sorted(self._models - serving)]
        if fault is not None:
            missing.insert(0, fault.what)
        elif not self._triton_is_ready and not missing:
            missing.append("tritonserver says that it is not ready")
        self.missing = tuple(missing)
        self.looked_s = time.monotonic()
        return fault

    def triton_hangs(self) -> bool:
        """Whether tritonserver has been silent for too long; asks it, at most once a second."""
        self._note_pause(_PAUSED_S)
        self._ask_triton()
        self._note_pause(_PAUSED_S + _ASKED_WITHIN_S)
        return self._silent_s() > TRITON_HANG_AFTER_S

    def are_callers_told(self) -> bool:
        """Whether the callers whose streams were lost with a detokenizer have got their errors.

        The engine ends such streams at once, but releases of Triton after 24.10 may hold back its
        errors for seconds. Waits a little for them.
        """
        if not self._noted.are_inside and self._requests() == self._noted:
            return True  # there were no streams
        deadline_s = time.monotonic() + _TOLD_WITHIN_S
        while True:
            lost = self._lost_streams()
            if lost is not None:
                num_lost = sum(lost[pid] - self._lost_before.get(pid, 0) for pid in lost)
                if not num_lost:
                    return True
                num_failed = self._server.num_failed(timeout_s=_TOLD_WITHIN_S)
                if num_failed is not None and num_failed - self._failed_before >= num_lost:
                    return True
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_TOLD_WITHIN_S / 10)

    def num_inside_others(self, model: str) -> Iterator[int]:
        """The number of requests inside each process of the other models, at this moment."""
        return (p.beat.num_inside for p in self.processes.look() if p.model != model)

    def close(self) -> None:
        """Stop looking, and close the handles of the server's processes."""
        self._asker.close()
        self.processes.close()

    def _note_pause(self, most_s: float) -> None:
        """Note a pause of this process if more than ``most_s`` have passed since the last call."""
        now_s = time.monotonic()
        if now_s - self.looked_s > most_s:
            self._awake_since_s = now_s
        self.looked_s = now_s

    def _silent_s(self) -> float:
        """How long tritonserver has been silent, not counting pauses of the whole machine."""
        return time.monotonic() - max(self._answered_s, self._awake_since_s)

    def _ask_triton(self) -> None:
        now_s = time.monotonic()
        if now_s - self._asked_s >= _ASK_EVERY_S:
            self._asked_s = now_s
            answer = self._server.is_ready(timeout_s=_ASK_EVERY_S)
            if answer is not None:  # on a busy machine silence means nothing until it is a hang
                self._triton_is_ready = answer
                self.has_answered()
                self._note_failures()

    def _note_failures(self) -> None:
        """Note the number of requests that have failed so far, if there were requests since the
        last call."""
        requests = self._requests()
        if requests == self._noted and not requests.are_inside:
            return
        num_failed = self._server.num_failed(timeout_s=_TOLD_WITHIN_S)
        lost = self._lost_streams(noticed=False)
        if all(process.is_alive for process in self.processes.look()):  # else losses may be counted
            self._noted = requests
            self._failed_before = self._failed_before if num_failed is None else num_failed
            self._lost_before = self._lost_before if lost is None else lost

    def _requests(self) -> RequestsSeen:
        beats = [process.beat for process in self.seen if process.model == OPTIONS_MODEL]
        num_seen = sum(beat.num_seen for beat in beats)
        return RequestsSeen(num_seen, are_inside=any(beat.num_inside for beat in beats))

    def _lost_streams(self, *, noticed: bool = True) -> dict[int, int] | None:
        """The number of streams that each engine, by process id, has ended because there was no
        detokenizer.

        None if an engine does not answer or, with ``noticed``, has not yet noticed the loss of its
        detokenizer.
        """
        lost = {}
        for process in self.seen:
            if process.model == OPTIONS_MODEL and process.is_alive:
                try:
                    counts = counts_of(self._server.directory, process)
                except (OSError, ValueError):
                    return None
                if not counts or (noticed and counts["num_detokenizers"]):
                    return None
                lost[process.pid] = int(counts["num_lost_streams"])
        return lost

    def _find_fault(self, seen_s: float) -> Fault | None:
        code = self._server.poll()
        if code is not None:
            return Fault(f"tritonserver ended with code {code}")
        if not self._server.repository.exists():
            return Fault(f"the server's files were removed from {self._server.directory}")
        awake_s = seen_s - self._awake_since_s
        wrong = {process: _wrong_with(process, seen_s, awake_s) for process in self.seen}
        found = {process: what for process, what in wrong.items() if what is not None}
        patience_s = TRITON_HANG_AFTER_S
        # If tritonserver hangs, a process that calls it blocks, and both become silent.
        if found and all(map(_is_only_silent, found)):
            patience_s = HANG_AFTER_S - 2 * _ASK_EVERY_S  # as it is asked only at intervals
        if self._silent_s() > patience_s:
            return Fault("; ".join([_TRITON_HANGS, *found.values()]))
        if found:
            return Fault("; ".join(found.values()), tuple(found))
        unanswered = self._asker.look(self.seen)
        return Fault(unanswered) if unanswered is not None else None


def _is_only_silent(process: ModelProcess) -> bool:
    return process.is_alive and process.beat.state is not State.BROKEN


def _wrong_with(process: ModelProcess, now_s: float, awake_s: float) -> str | None:
    name = f"{process.model} (process {process.pid})"
    silent_s = min(process.beat.silent_s(now_s), awake_s)
    if not process.is_alive:
        return f"{name} ended unexpectedly"
    if process.beat.state is State.BROKEN:
        return f"{name} broke"
    if silent_s > HANG_AFTER_S:
        return f"{name} hangs: silent for {silent_s:.1f} s"
    return None
