"""A fault: its number in the catalogue, a sentence, how it is provoked, and on which server.

Knows the check's own servers, which it starts. Must not know which faults there are.

Faults share a server if they can (a ``Scene``), since a start takes seconds; but only as many as
its supervisor tolerates before it gives up.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from minisgl_client.errors import MinisglError

from minisgl_backend.errors import MiniSGLError
from minisgl_check.canary import PROMPTS, Canary
from minisgl_check.case import Case
from minisgl_check.invariants import Invariants
from minisgl_check.own_server import OPTIONS, PATIENCE_S, OwnServer, started
from minisgl_check.waiting import wait_until


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of all faults. ``is_timed``: promised times are judged, too. ``num_requests``,
    if set, replaces the number of requests of a fault that has such a number."""

    rng: random.Random
    is_timed: bool
    num_requests: int | None = None
    tritonserver: str | None = None
    patience_s: float = PATIENCE_S


@dataclass(frozen=True, slots=True)
class Stage:
    """A server of our own, its canary, and its invariants."""

    own: OwnServer
    canary: Canary
    invariants: Invariants
    settings: Settings

    def expect_canary(self, case: Case) -> None:
        """Ask each prompt once; the answers must be what they were."""
        canary = self.canary
        num_wrong = len(canary.mismatches)

        def is_answered() -> bool:
            num_before = canary.num_runs
            canary.compare_all()
            return canary.num_runs - num_before == len(PROMPTS)

        # a broken connection is not retried at once
        answered = wait_until(is_answered, self.settings.patience_s)
        case.expect(answered, "the canary's prompts were not answered")
        wrong = canary.mismatches[num_wrong:]
        case.expect(not wrong, f"the canary's answers changed: {wrong}")


Place = TypeVar("Place", Stage, Settings)


@dataclass(frozen=True, slots=True)
class Fault(Generic[Place]):
    """``provoke`` notes in the case what it saw; ``has_figures`` if that includes times."""

    number: str
    sentence: str
    provoke: Callable[[Place, Case], None]
    has_figures: bool = False

    def tried(self, place: Place) -> Case:
        """Provoke it; returns its case, which fails if the server breaks or something is left
        behind."""
        case = Case(f"{self.number} {self.sentence}")
        begin_s = time.perf_counter()
        try:
            self.provoke(place, case)
            case.seconds = time.perf_counter() - begin_s
            if isinstance(place, Stage):
                place.invariants.renew()
                case.failures += place.invariants.violations()
        except Exception as error:
            case.expect(False, f"stumbled over {type(error).__name__}: {error}")
        return case


@dataclass(frozen=True, slots=True)
class Scene(Generic[Place]):
    """Faults that are provoked on one server, in this order."""

    opened: Callable[[Settings], AbstractContextManager[Place]]
    faults: tuple[Fault[Place], ...]

    def measured(self) -> Scene[Place]:
        """The same scene with only the faults that have figures."""
        return replace(self, faults=tuple(fault for fault in self.faults if fault.has_figures))

    def numbered(self, numbers: Collection[str]) -> Scene[Place]:
        """The same scene with only the faults of these numbers."""
        return replace(
            self, faults=tuple(fault for fault in self.faults if fault.number in numbers)
        )

    def cases(self, settings: Settings) -> Iterator[Case]:
        """The cases of all faults as they end; a single failed one if the place cannot be made."""
        try:
            with self.opened(settings) as place:
                for fault in self.faults:
                    yield fault.tried(place)
        except (MinisglError, MiniSGLError) as error:
            numbers = ", ".join(fault.number for fault in self.faults)
            yield Case(f"the server for {numbers}", failures=[f"{error}"])


@contextmanager
def stage(
    settings: Settings, options: Mapping[str, str] = OPTIONS, *, repository: Path | None = None
) -> Iterator[Stage]:
    """A fresh server with these options, warmed up."""
    with started(options, repository=repository, tritonserver=settings.tritonserver) as own:
        canary = Canary(own)
        try:
            canary.record()
            yield Stage(own, canary, Invariants(own), settings)
        finally:
            canary.close()


def nowhere(settings: Settings) -> AbstractContextManager[Settings]:
    """The place of faults that start everything they need themselves."""
    return nullcontext(settings)
