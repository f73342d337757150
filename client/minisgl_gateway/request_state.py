"""What is known of a request besides what its caller asks for; it travels in the ASGI scope.

``Gate`` makes it. Routes note there what concerns the answer. Must not know what a route does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import Scope

_NAME: Final = "minisgl_gateway"


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is; both are "" if no keys are in use."""

    label: str = ""
    salt: str = ""


@dataclass(slots=True)
class RequestState:
    """The state of one request.

    ``deadline_s`` is the reading of ``time.monotonic`` at which it must have ended.
    ``callers_id`` is the id that the caller sent, or "". ``request_id`` goes into the headers of
    the answer if the caller sent none; a route replaces it by the id of its answer. A route also
    notes the ``adapter`` that is asked for as a model; ``without_effect``, names of parameters for
    a header; and ``outcome``, the status of a stream that fails after its start.
    """

    deadline_s: float
    callers_id: str = ""
    request_id: str = ""
    caller: Caller = Caller()
    adapter: str | None = None
    without_effect: Sequence[str] = ()
    outcome: int | None = None

    def enter(self, scope: Scope) -> None:
        """Travel in this scope from now on."""
        scope.setdefault("state", {})[_NAME] = self

    @property
    def left_s(self) -> float:
        """The time until the deadline."""
        return self.deadline_s - time.monotonic()

    @property
    def told_id(self) -> str:
        """The id by which the caller knows the request."""
        return self.callers_id or self.request_id


def state_of(scope: Scope) -> RequestState:
    """The state of a request that has come to the gate."""
    state: RequestState = scope["state"][_NAME]
    return state


def id_in_log(scope_state: Mapping[str, Any]) -> str:
    """The id of a request for the log; "-" if it has not come to the gate."""
    state: RequestState | None = scope_state.get(_NAME)
    return "-" if state is None else state.request_id
