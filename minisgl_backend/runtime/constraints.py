"""The open requests whose output must follow a grammar: their matchers, and the rows they hold.

Used on the loop's thread only. The loop reports which requests come, take rows, get tokens and end;
this module derives the masks of a step from that, and tells the planner what may come next
(``Lookahead``). Must not know how a grammar is followed (``grammar``) or where masks go.

A request whose grammar is being compiled is open, but the planner does not know it yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from minisgl_backend.errors import EngineFailure, InvalidRequest, MiniSGLError, Unsupported
from minisgl_backend.grammar.matchers import AnswerState, Batch, Filling, Grammars, Matcher
from minisgl_backend.plan import NO_TOKEN, Pending, StepPlan
from minisgl_backend.request import (
    Failed,
    Finished,
    FinishReason,
    IntArray,
    Request,
    RequestId,
    TerminalEvent,
    TokenId,
)


@dataclass(frozen=True, slots=True)
class Compiled:
    """The outcome of compiling a request's grammar: a matcher, or the error."""

    request_id: RequestId
    outcome: Matcher | MiniSGLError


@dataclass(frozen=True, slots=True, eq=False)
class _MaskedRows:
    """The rows that a plan masks, ``planned``, and the ``rows`` among them whose requests are still
    open, int32[n] each, with their matchers. A row has a mask, and one for each of its guesses."""

    planned: IntArray
    rows: IntArray
    request_ids: Sequence[RequestId]
    batch: Batch


@dataclass(frozen=True, slots=True, eq=False)
class StepMasks:
    """Masks of a step that are being written, for its ``samples``: indices of
    ``StepPlan.sample_rows``, int32[num_masks]."""

    masked: _MaskedRows
    samples: IntArray
    _filling: Filling

    def written(self) -> dict[RequestId, Failed]:
        """Wait for them; returns the requests whose grammars have reached their limits."""
        return {
            self.masked.request_ids[index]: Failed(InvalidRequest(complaint))
            for index, complaint in self._filling.result().items()
        }

    def wait(self) -> None:
        """Wait until the matchers are free."""
        self._filling.wait()


class Constraints:
    """The matchers of open requests. Costs a step nothing while no request has a grammar."""

    def __init__(self, grammars: Grammars | None) -> None:
        """``grammars`` is None if an option says so, or if this engine has no tokenizer: then
        grammars are refused."""
        self._grammars = grammars
        self._matchers: dict[RequestId, Matcher] = {}
        self._by_row: dict[int, RequestId] = {}  # the last request with a grammar to hold the row
        # of the last masked step in which no row has guesses; None once out of date
        self._masked: _MaskedRows | None = None
        self._last: StepMasks | None = None
        self._compiling: dict[RequestId, Callable[[], bool] | None] = {}

    @property
    def are_compiling(self) -> bool:
        """Whether any request waits for its grammar."""
        return bool(self._compiling)

    def is_compiling(self, request_id: RequestId) -> bool:
        """Whether the request waits for its grammar."""
        return request_id in self._compiling

    def compile(self, request: Request, report: Callable[[Compiled], None]) -> None:
        """Have the grammar of a request compiled; ``report`` is called on another thread."""
        request_id = request.id
        if self._grammars is None:
            self._compiling[request_id] = None
            refusal = Unsupported("a grammar needs the option structured_outputs, and a tokenizer")
            report(Compiled(request_id, refusal))
            return
        self._compiling[request_id] = self._grammars.compile(
            request.sampling, lambda outcome: report(Compiled(request_id, outcome))
        )

    def compiled(self, message: Compiled) -> MiniSGLError | None:
        """Take a matcher for an open request; returns the error if there is none."""
        self._compiling.pop(message.request_id, None)
        if isinstance(message.outcome, MiniSGLError):
            return message.outcome
        self._matchers[message.request_id] = message.outcome
        return None

    def forget(self, request_id: RequestId) -> None:
        """The request has ended. If its grammar still waits to be compiled, it is not compiled."""
        if (take_back := self._compiling.pop(request_id, None)) is not None:
            take_back()
        if self._matchers.pop(request_id, None) is not None:
            self._masked = None

    def come_back(self, request_id: RequestId, token_ids: Sequence[TokenId]) -> None:
        """The request starts again with the tokens that it has, after a step that broke."""
        matcher = self._matchers.get(request_id)
        if matcher is not None:
            matcher.start_anew(token_ids)

    def close(self) -> None:
        """Stop compiling grammars."""
        if self._grammars is not None:
            self._grammars.close()

    def admit(self, plan: StepPlan) -> None:
        """Note which rows requests take with this plan."""
        if self._matchers:
            for admission in plan.admissions:
                if admission.request_id in self._matchers:
                    self._by_row[admission.row] = admission.request_id
                    self._masked = None

    def masks(self, plan: StepPlan, pending: Pending) -> StepMasks:
        """Begin to write the masks of a launched plan. All tokens of earlier steps must have been
        followed (``follow``), and no later token may be until the masks are written."""
        assert self._grammars is not None
        masked, guesses = self._masked, plan.checks.guesses()
        if guesses:
            masked = self._find(plan.masked_rows, guesses)
        elif masked is None or not np.array_equal(masked.planned, plan.masked_rows):
            masked = self._masked = self._find(plan.masked_rows, {})
        samples = _samples_of(masked.rows, plan.sample_rows)
        filling = self._grammars.fill(masked.batch, pending.masks(len(samples)))
        self._last = StepMasks(masked, samples, filling)
        return self._last

    def forced(self, request_id: RequestId) -> Sequence[TokenId]:
        """See ``Lookahead``."""
        if self._last is not None:
            self._last.wait()
        matcher = self._matchers.get(request_id)
        return () if matcher is None else matcher.forced()

    def allowed(self, request_id: RequestId, guesses: Sequence[TokenId]) -> int:
        """See ``Lookahead``."""
        matcher = self._matchers.get(request_id)
        return 0 if matcher is None else matcher.allowed(guesses)

    def _find(self, planned: IntArray, guesses: Mapping[int, IntArray]) -> _MaskedRows:
        matchers, by_row = self._matchers, self._by_row
        found = [
            (row, request_id, matchers[request_id])
            for row in planned.tolist()
            if (request_id := by_row.get(row)) in matchers  # the others have since ended
        ]
        rows, request_ids, batch = zip(*found, strict=True) if found else ((), (), ())
        of_rows = {index: guesses[row].tolist() for index, row in enumerate(rows) if row in guesses}
        return _MaskedRows(planned, np.array(rows, np.int32), request_ids, Batch(batch, of_rows))

    def follow(self, masks: StepMasks, token_ids: IntArray) -> dict[RequestId, TerminalEvent]:
        """Let the matchers of a step's masked rows take its tokens; returns the requests that end
        because of it. ``token_ids`` are those of all samples of the step, masked or not."""
        assert self._grammars is not None
        self._last = None
        request_ids, batch = masks.masked.request_ids, masks.masked.batch
        token_ids = token_ids[masks.samples]
        if batch.guesses:
            token_ids = _take_right(batch, token_ids)
        if (token_ids == NO_TOKEN).any():
            kept = np.flatnonzero(token_ids != NO_TOKEN).tolist()
            request_ids = [request_ids[index] for index in kept]
            batch = Batch([batch.matchers[index] for index in kept])
            token_ids = token_ids[kept]
        states = self._grammars.advance(batch, token_ids.tolist())
        return {
            request_ids[index]: _end_of(state)
            for index, state in states.items()
            if request_ids[index] in self._matchers  # the others have since ended
        }


def _end_of(state: AnswerState) -> TerminalEvent:
    """A new event each time: whoever raises an error adds to its traceback."""
    match state:
        case AnswerState.COMPLETE:
            return Finished(FinishReason.STOP)
        case AnswerState.TOO_COMPLEX:
            return Failed(InvalidRequest("the grammar is too complex"))
        case AnswerState.BROKEN:
            return Failed(EngineFailure("a token does not follow the grammar"))


def _samples_of(rows: IntArray, sample_rows: IntArray) -> IntArray:
    """The indices of ``sample_rows`` at which any of ``rows`` stand, int32[num_samples]."""
    if len(rows) == len(sample_rows):
        return np.arange(len(rows), dtype=np.int32)
    return np.flatnonzero(np.isin(sample_rows, rows)).astype(np.int32)


def _take_right(batch: Batch, token_ids: IntArray) -> IntArray:
    """Let matchers take the guesses that are right, and return each row's token after these, int32
    [num_rows]. ``token_ids`` are those of all masks; a row that lacks one has ``NO_TOKEN``."""
    due = token_ids[batch.first_lines]  # [num_rows]
    for index, guesses in batch.guesses.items():
        line = batch.first_lines[index]
        samples = token_ids[line : line + 1 + len(guesses)].tolist()
        if NO_TOKEN in samples:
            due[index] = NO_TOKEN
            continue
        num_right = 0
        while num_right < len(guesses) and samples[num_right] == guesses[num_right]:
            num_right += 1
        batch.matchers[index].consume(guesses[:num_right])
        due[index] = samples[num_right]
    return due
