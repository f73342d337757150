"""What a rank keeps in main memory: copies of pages, and of recurrent states if the model has any.

Knows which part of ``HostCopies`` is for which. Must not know what a copy consists of.
"""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_backend.errors import InvariantError
from minisgl_backend.execution.host_pages import HostPages
from minisgl_backend.execution.host_states import HostStates
from minisgl_backend.plan import HostCopies


@dataclass(frozen=True, slots=True, eq=False)
class HostSlots:
    """The slots of main memory. Used only in submitted work."""

    pages: HostPages
    states: HostStates | None = None

    def save(self, copies: HostCopies) -> None:
        """Queue copies to main memory."""
        if len(copies.pages):
            self.pages.save(copies)
        if len(copies.snapshots):
            self._states_of(copies).save(copies)

    def load(self, copies: HostCopies) -> None:
        """Queue copies from main memory."""
        if len(copies.pages):
            self.pages.load(copies)
        if len(copies.snapshots):
            self._states_of(copies).load(copies)

    def _states_of(self, copies: HostCopies) -> HostStates:
        if self.states is None:
            raise InvariantError(f"a plan copies {len(copies.snapshots)} states, and none are kept")
        return self.states
