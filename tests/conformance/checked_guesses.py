"""Which guesses of an MTP layer an engine has checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minisgl_backend.models.decoder import Decoder
from minisgl_backend.plan import SampledTokens, StepPlan
from minisgl_backend.request import EMPTY, IntArray, Request, SamplingParams
from minisgl_backend.runtime.ports import Scheduler
from minisgl_backend.scheduling.report import StepResult
from minisgl_kit.wrappers import SchedulerWrapper
from tests.conformance.engines import TinyEngine


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


def check_guesses(
    model: Decoder,
    prompts: Sequence[IntArray],
    sampling: Sequence[SamplingParams],
    reference: Callable[[list[int], int], list[int]],
    *,
    context: int,
) -> tuple[int, int]:
    """Serve the prompts in small chunks: of the three guesses after what is known each time, those
    that were checked must be the ``reference``'s. Returns the numbers of guesses and of right
    ones."""
    planners: list[CheckedGuesses] = []

    def noted(scheduler: Scheduler) -> Scheduler:
        planners.append(CheckedGuesses(scheduler))
        return planners[0]

    options: dict[str, Any] = {"page_size": 4, "chunk": 16, "radix": False, "mtp_tokens": 3}
    with TinyEngine(model, context=context, wrap=noted, **options) as engine:
        engine.run(prompts, sampling)
        num_guesses, num_right = engine.num_guesses
    assert len(planners[0].found) > len(prompts)
    for guess in planners[0].found:
        assert guess.tokens == reference(guess.known, 3)[: len(guess.tokens)]
    assert num_right < num_guesses
    return num_guesses, num_right
