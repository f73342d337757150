"""The open requests whose output must follow a grammar: their matchers, and the rows they hold.

Used on the loop's thread only. The loop says which requests come, hold rows, get tokens and end;
here is known what that means for the masks of a step. Must not know how a grammar is followed
(``grammar``) or where masks go.

A request whose grammar is being compiled is open, but not yet known to the planner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from minisgl_backend.errors import MiniSGLError, Unsupported
from minisgl_backend.grammar.matchers import Grammars, Matcher
from minisgl_backend.plan import StepPlan
from minisgl_backend.request import EMPTY, IntArray, Request, RequestId
from minisgl_backend.scheduling.report import StepResult


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of a request's grammar: a matcher, or what is wrong."""

    request_id: RequestId
    outcome: Matcher | MiniSGLError


class Constraints:
    """Empty, and of no cost to a step, while no request brings a grammar."""

    def __init__(self, grammars: Grammars | None) -> None:
        """``grammars`` is None if this engine knows no tokenizer: then grammars are refused."""
        self._grammars = grammars
        self._matchers: dict[RequestId, Matcher] = {}
        self._by_row: dict[int, RequestId] = {}  # the last request with a grammar that held it
        self._compiling: set[RequestId] = set()

    def is_compiling(self, request_id: RequestId) -> bool:
        """Whether the request has to wait for its grammar."""
        return request_id in self._compiling

    def compile(self, request: Request, report: Callable[[Compiled], None]) -> None:
        """Have the grammar of a request compiled; ``report`` is called on another thread."""
        request_id, grammar = request.id, request.sampling.grammar
        assert grammar is not None
        self._compiling.add(request_id)
        if self._grammars is None:
            refusal = Unsupported("this engine has no tokenizer, which grammars need")
            report(Compiled(request_id, refusal))
            return
        self._grammars.compile(grammar, lambda outcome: report(Compiled(request_id, outcome)))

    def compiled(self, message: Compiled) -> MiniSGLError | None:
        """Take a matcher for an open request; what is wrong if there is none."""
        self._compiling.discard(message.request_id)
        if isinstance(message.outcome, MiniSGLError):
            return message.outcome
        self._matchers[message.request_id] = message.outcome
        return None

    def forget(self, request_id: RequestId) -> None:
        """The request has ended."""
        self._compiling.discard(request_id)
        self._matchers.pop(request_id, None)

    def close(self) -> None:
        """End what compiles grammars."""
        if self._grammars is not None:
            self._grammars.close()

    def admit(self, plan: StepPlan) -> None:
        """Note which rows requests take with this plan."""
        for admission in plan.admissions:
            if admission.request_id in self._matchers:
                self._by_row[admission.row] = admission.request_id

    def masks(self, plan: StepPlan) -> tuple[IntArray, IntArray, dict[RequestId, MiniSGLError]]:
        """The masked rows of the plan whose requests are still open, int32[n], their masks,
        int32[n, num_words], and the requests whose grammar came to its limits.

        To be asked when all steps before this one are committed.
        """
        assert self._grammars is not None
        of_rows = [
            (row, request_id, self._matchers[request_id])
            for row in plan.masked_rows.tolist()
            if (request_id := self._by_row.get(row)) in self._matchers
        ]
        if not of_rows:  # all of them have ended meanwhile
            return EMPTY, np.empty((0, self._grammars.num_words), np.int32), {}
        rows, request_ids, matchers = zip(*of_rows, strict=True)
        masks = np.empty((len(rows), self._grammars.num_words), np.int32)
        failed = self._grammars.fill(matchers, masks)
        errors: dict[RequestId, MiniSGLError] = {
            request_ids[index]: error for index, error in failed.items()
        }
        return np.array(rows, np.int32), masks, errors

    def advance(self, result: StepResult) -> list[RequestId]:
        """Take the tokens of a step; the requests whose answers are complete by them."""
        if not self._matchers or self._grammars is None:
            return []
        followed = [
            (request_id, self._matchers[request_id], token_id)
            for request_id, token_id in zip(
                result.request_ids, result.token_ids.tolist(), strict=True
            )
            if request_id in self._matchers
        ]
        if not followed:
            return []
        request_ids, matchers, token_ids = zip(*followed, strict=True)
        ended = self._grammars.advance(matchers, token_ids)
        return [request_ids[index] for index, is_over in enumerate(ended) if is_over]
