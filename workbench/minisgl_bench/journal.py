"""What a planner did and when, line by line in a file, for benches that look from another process.

Metrics are told four times a second; where a benchmark needs to know the instant at which a request
was admitted, sampled a token or ended, the planner is wrapped in a ``JournaledScheduler``. Times
are of ``time.monotonic``, which is one clock for all processes of a machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from minisgl_backend.parts import Parts
from minisgl_backend.plan import SampledTokens, StepPlan, StepResult
from minisgl_backend.request import EMPTY, IntArray, Request, RequestId
from minisgl_backend.runtime import ports
from minisgl_backend.scheduling.scheduler import Scheduler
from minisgl_kit.wrappers import SchedulerWrapper

What: TypeAlias = Literal["added", "aborted", "admitted", "sampled"]

_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing done to some requests, and how many rows and pages are held after it."""

    time_s: float
    what: What
    request_ids: list[int]
    num_running: int
    num_used_pages: int


def journaled(path: Path) -> Parts:
    """The parts of an engine whose planner writes down what it does."""
    return Parts(scheduler=lambda cache, config: JournaledScheduler(Scheduler(cache, config), path))


class JournaledScheduler(SchedulerWrapper):
    """A planner that writes down what it does; the engine's thread alone calls it."""

    def __init__(self, scheduler: ports.Scheduler, path: Path) -> None:
        super().__init__(scheduler)
        self._path = path

    def add(self, request: Request, generated: IntArray = EMPTY) -> None:
        super().add(request, generated)
        self._note("added", [request.id])

    def abort(self, request_id: RequestId) -> bool:
        was_live = super().abort(request_id)
        self._note("aborted", [request_id] if was_live else [])
        return was_live

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        if plan is not None and plan.admissions:
            self._note("admitted", [admission.request_id for admission in plan.admissions])
        return plan

    def commit(self, plan: StepPlan, tokens: SampledTokens) -> StepResult:
        result = super().commit(plan, tokens)
        self._note("sampled", result.request_ids)
        return result

    def _note(self, what: What, request_ids: Iterable[int]) -> None:
        now_s = time.monotonic()
        stats = self.stats()
        entry = Entry(now_s, what, list(request_ids), stats.num_running, stats.used_pages)
        # opened for each line, since a planner is not told of its end
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(entry)) + "\n")


class Journal:
    """Reads the entries of a journal while they are written."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._entries: list[Entry] = []
        self._file = path.open(encoding="utf-8")
        self._part = ""

    def read(self) -> list[Entry]:
        """All entries so far."""
        *lines, self._part = (self._part + self._file.read()).split("\n")
        self._entries.extend(Entry(**json.loads(line)) for line in lines)
        return self._entries

    def find(
        self, condition: Callable[[Entry], bool], *, since: int, timeout_s: float
    ) -> Entry | None:
        """The first entry from index ``since`` on that meets the condition; None: not in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            is_late = time.monotonic() > deadline
            entries = self.read()
            for entry in entries[since:]:
                if condition(entry):
                    return entry
            since = max(since, len(entries))
            if is_late:
                return None
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
