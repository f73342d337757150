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
from minisgl_backend.grammar.matchers import Filling, Grammars, Matcher, State
from minisgl_backend.plan import Pending, StepPlan
from minisgl_backend.request import (
    EMPTY,
    Failed,
    Finished,
    FinishReason,
    IntArray,
    Request,
    RequestId,
    TokenId,
)
from minisgl_backend.scheduling.report import StepResult

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
class StepMasks:
    """Masks that are being written, for the ``rows`` of a step, int32[n]."""

    rows: IntArray
    _request_ids: Sequence[RequestId]
    _filling: Filling | None

    def written(self) -> dict[RequestId, Failed]:
        """Wait for them; returns the requests whose grammars have reached their limits."""
        complaints = {} if self._filling is None else self._filling.result()
        return {
            self._request_ids[index]: Failed(InvalidRequest(complaint))
            for index, complaint in complaints.items()
        }


class Constraints:
    """Empty, and of no cost to a step, while no request brings a grammar."""

    def __init__(self, grammars: Grammars | None) -> None:
        """``grammars`` is None if this engine knows no tokenizer: then grammars are refused."""
        self._grammars = grammars
        self._matchers: dict[RequestId, Matcher] = {}
        self._by_row: dict[int, RequestId] = {}  # the last request with a grammar that held it
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
        self._matchers.pop(request_id, None)

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

    def masks(self, plan: StepPlan, pending: Pending) -> StepMasks:
        """Begin to write the masks of a launched plan. All steps before it are committed; no token
        is advanced until they are written."""
        matchers, by_row = self._matchers, self._by_row
        found = [
            (row, request_id, matchers[request_id])
            for row in plan.masked_rows.tolist()
            if (request_id := by_row.get(row)) in matchers  # the others have ended meanwhile
        ]
        if not found or self._grammars is None:
            return StepMasks(EMPTY, (), None)
        rows, request_ids, of_rows = zip(*found, strict=True)
        filling = self._grammars.fill(of_rows, pending.masks(len(rows)))
        return StepMasks(np.array(rows, np.int32), request_ids, filling)

    def advance(self, result: StepResult) -> dict[RequestId, Finished | Failed]:
        """Take the tokens of a step; the requests that end by what their grammars say of them."""
        matchers = self._matchers
        if not matchers or self._grammars is None:
            return {}
        followed = [
            (request_id, matchers[request_id], token_id)
            for request_id, token_id in zip(
                result.request_ids, result.token_ids.tolist(), strict=True
            )
            if request_id in matchers
        ]
        ended: dict[RequestId, Finished | Failed] = {}
        if not followed:
            return ended
        request_ids, of_tokens, token_ids = zip(*followed, strict=True)
        for index, state in self._grammars.advance(of_tokens, token_ids).items():
            ended[request_ids[index]] = _END_OF[state]
        return ended
