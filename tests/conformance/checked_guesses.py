"""Which guesses of an MTP layer an engine has checked."""

from __future__ import annotations

from dataclasses import dataclass, replace

from minisgl_backend.plan import SampledTokens, StepPlan
from minisgl_backend.request import EMPTY, IntArray, Request
from minisgl_backend.runtime.ports import Scheduler
from minisgl_backend.scheduling.report import StepResult
from minisgl_kit.wrappers import SchedulerWrapper


@dataclass(frozen=True, slots=True)
class CheckedGuess:
    """Tokens that were guessed after those ``known`` of a request, its prompt and its answer so
    far."""

    known: list[int]
    tokens: list[int]


class CheckedGuesses(SchedulerWrapper):
    """A planner that notes what was guessed in ``found``."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.found: list[CheckedGuess] = []
        self._known: dict[int, list[int]] = {}  # by request
        self._requests: dict[int, int] = {}  # by row

    def add(self, request: Request, generated: IntArray = EMPTY, num_scored: int = 0) -> None:
        super().add(request, generated, num_scored)
        self._known[request.id] = [*request.prompt.tolist(), *generated.tolist()]

    def commit(self, plan: StepPlan, tokens: SampledTokens) -> StepResult:
        self._requests |= {admission.row: admission.request_id for admission in plan.admissions}
        if tokens.checked is not None:
            for row, guesses in replace(plan.checks, tokens=tokens.checked).guesses().items():
                known = list(self._known[self._requests[row]])
                self.found.append(CheckedGuess(known, guesses.tolist()))
        result = super().commit(plan, tokens)
        for request_id, token in zip(result.request_ids, result.token_ids.tolist(), strict=True):
            self._known[request_id].append(token)
        return result
