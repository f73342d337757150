"""The open requests whose output must follow a grammar: their matchers, and the rows they hold.

Used on the loop's thread only. The loop says which requests come, hold rows, get tokens and end;
here is known what that means for the masks of a step. Must not know how a grammar is followed
(``grammar``) or where masks go.

A request whose grammar is being compiled is open, but not yet known to the planner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from minisgl_backend.errors import EngineFailure, InvalidRequest, MiniSGLError, Unsupported
from minisgl_backend.grammar.matchers import Batch, Filling, Grammars, Matcher, State
from minisgl_backend.plan import NO_TOKEN, Pending, StepPlan
from minisgl_backend.request import (
    Failed,
    Finished,
    FinishReason,
    IntArray,
    Request,
    RequestId,
    TokenId,
)

_END_OF: Final[Mapping[State, Finished | Failed]] = MappingProxyType(
    {
        State.COMPLETE: Finished(FinishReason.STOP),
        State.TOO_COMPLEX: Failed(InvalidRequest("the grammar is too complex")),
        State.BROKEN: Failed(EngineFailure("a token does not follow the grammar")),
    }
)


@dataclass(frozen=True, slots=True)
class Compiled:
    """The outcome of compiling a request's grammar: a matcher, or the error."""

    request_id: RequestId
    outcome: Matcher | MiniSGLError


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Of the rows that plans mask, int32[n], those of open requests, with their matchers."""

    planned: IntArray
    rows: IntArray
    request_ids: Sequence[RequestId]
    batch: Batch


@dataclass(frozen=True, slots=True, eq=False)
class StepMasks:
    """Masks that are being written, for some rows of a step."""

    of: _Rows
    _filling: Filling

    def written(self) -> dict[RequestId, Failed]:
        """Wait for them; returns the requests whose grammars have reached their limits."""
        return {
            self.of.request_ids[index]: Failed(InvalidRequest(complaint))
            for index, complaint in self._filling.result().items()
        }


class Constraints:
    """Empty, and of no cost to a step, while no request brings a grammar."""

    def __init__(self, grammars: Grammars | None) -> None:
        """``grammars`` is None if this engine knows no tokenizer: then grammars are refused."""
        self._grammars = grammars
        self._matchers: dict[RequestId, Matcher] = {}
        self._by_row: dict[int, RequestId] = {}  # the last request with a grammar that held it
        self._rows: _Rows | None = None  # of the last step with masks; None if others are open now
        self._compiling: dict[RequestId, Callable[[], bool] | None] = {}

    @property
    def are_compiling(self) -> bool:
        """Whether any request has to wait for its grammar."""
        return bool(self._compiling)

    def is_compiling(self, request_id: RequestId) -> bool:
        """Whether the request has to wait for its grammar."""
        return request_id in self._compiling

    def compile(self, request: Request, report: Callable[[Compiled], None]) -> None:
        """Have the grammar of a request compiled; ``report`` is called on another thread."""
        request_id = request.id
        if self._grammars is None:
            self._compiling[request_id] = None
            refusal = Unsupported("this engine takes no grammars")
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
        """The request has ended; a grammar that has not yet been begun is not compiled for it."""
        if (take_back := self._compiling.pop(request_id, None)) is not None:
            take_back()
        if self._matchers.pop(request_id, None) is not None:
            self._rows = None

    def come_back(self, request_id: RequestId, token_ids: Sequence[TokenId]) -> None:
        """The request starts anew with the tokens that it has, after a step that broke."""
        matcher = self._matchers.get(request_id)
        if matcher is not None:
            matcher.start_anew(token_ids)

    def close(self) -> None:
        """End what compiles grammars."""
        if self._grammars is not None:
            self._grammars.close()

    def admit(self, plan: StepPlan) -> None:
        """Note which rows requests take with this plan."""
        if self._matchers:
            for admission in plan.admissions:
                if admission.request_id in self._matchers:
                    self._by_row[admission.row] = admission.request_id
                    self._rows = None

    def masks(self, plan: StepPlan, pending: Pending) -> StepMasks:
        """Begin to write the masks of a launched plan. The tokens of all steps before it have been
        followed; no other is until the masks are written."""
        assert self._grammars is not None
        of = self._rows
        if of is None or not np.array_equal(of.planned, plan.masked_rows):
            of = self._rows = self._find(plan.masked_rows)
        return StepMasks(of, self._grammars.fill(of.batch, pending.masks(len(of.rows))))

    def _find(self, planned: IntArray) -> _Rows:
        matchers, by_row = self._matchers, self._by_row
        found = [
            (row, request_id, matchers[request_id])
            for row in planned.tolist()
            if (request_id := by_row.get(row)) in matchers  # the others have ended meanwhile
        ]
        rows, request_ids, of_rows = zip(*found, strict=True) if found else ((), (), ())
        return _Rows(planned, np.array(rows, np.int32), request_ids, Batch(of_rows))

    def follow(
        self, plan: StepPlan, masks: StepMasks, token_ids: IntArray
    ) -> dict[RequestId, Finished | Failed]:
        """Follow the tokens of a step's masked rows, where ``token_ids`` are those of all its rows;
        the requests that end by what their grammars say of them."""
        assert self._grammars is not None
        of, sampled = masks.of, plan.sample_rows
        request_ids, batch = of.request_ids, of.batch
        if len(of.rows) < len(sampled):
            token_ids = token_ids[np.isin(sampled, of.rows)]  # both in the same order
        if (token_ids == NO_TOKEN).any():
            kept = np.flatnonzero(token_ids != NO_TOKEN).tolist()
            request_ids = [request_ids[index] for index in kept]
            batch = Batch([batch.matchers[index] for index in kept])
            token_ids = token_ids[kept]
        states = self._grammars.advance(batch, token_ids.tolist())
        return {
            request_ids[index]: _END_OF[state]
            for index, state in states.items()
            if request_ids[index] in self._matchers  # the others have ended meanwhile
        }
