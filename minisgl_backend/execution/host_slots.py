"""What a rank keeps in main memory: copies of pages, and of window pages and recurrent states if
the model has any.

Knows which part of ``HostCopies`` is for which. Must not know what a copy consists of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from minisgl_backend.errors import InvariantError
from minisgl_backend.execution.host_pages import HostPages
from minisgl_backend.execution.host_states import HostStates
from minisgl_backend.plan import HostCopies
from minisgl_backend.request import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class HostSlots:
    """The slots of main memory. Used only in submitted work. Without ``pages`` these are numbers
    that take no memory, since all layers have window pages."""

    pages: HostPages | None = None
    window_pages: HostPages | None = None
    states: HostStates | None = None

    def save(self, copies: HostCopies) -> None:
        """Queue copies to main memory."""
        for kept, sources, slots in self._parts(copies):
            kept.save(sources, slots)

    def load(self, copies: HostCopies) -> None:
        """Queue copies from main memory."""
        for kept, targets, slots in self._parts(copies):
            kept.load(targets, slots)

    def _parts(
        self, copies: HostCopies
    ) -> Iterator[tuple[HostPages | HostStates, IntArray, IntArray]]:
        """What is copied of each kind, on the device and in main memory."""
        if self.pages is not None:
            yield self.pages, copies.pages, copies.slots
        for kept, on_device, slots in (
            (self.window_pages, copies.window_pages, copies.window_slots),
            (self.states, copies.snapshots, copies.state_slots),
        ):
            if kept is not None:
                yield kept, on_device, slots
            elif len(slots):
                raise InvariantError(f"a plan copies to or from {len(slots)} slots that are none")
