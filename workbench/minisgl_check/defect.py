"""Defects of engines that are made to break, and the file that switches one of them on.

Knows the file and the names of the defects. Must not import the engine: both sides read this file,
the check, which switches defects on, and the processes that have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Final

MARK: Final = 666_013
"""The seed of a poisoned request."""
STEP_S: Final = 0.02
"""The least duration of a step while steps are slow."""


class Defect(Enum):
    """What ``frail`` can break."""

    ONE_FORWARD = "the next forward pass raises"
    EVERY_FORWARD = "every forward pass raises"
    SAMPLING = "sampling for a marked request raises"
    NAN = "the logits of a marked request are NaN"
    ONE_FORWARD_OF_RANK_1 = "the next forward pass of rank 1 raises"
    NO_PAGES_TO_ADMIT = "pages vanish when a request waits for its prefill"
    NO_PAGES_BETWEEN_CHUNKS = "pages vanish between the chunks of a prompt"
    NO_PAGES_TO_DECODE = "pages vanish while requests decode"
    SLOW = "steps take their time"
    PAUSES = "pauses everywhere"


class Switch:
    """Switches one defect at a time on, in all processes that read the same folder.

    ``was_met`` becomes true once a defect has taken effect; only defects whose effect may not show
    report this.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "defect"
        self._met = folder / "defect-met"

    @contextmanager
    def on(self, defect: Enum) -> Iterator[None]:
        """The defect is on until the block ends, or ``off`` is called."""
        self._met.unlink(missing_ok=True)
        self._file.write_text(defect.value, encoding="utf-8")
        try:
            yield
        finally:
            self.off()

    def off(self) -> None:
        """No defect from now on."""
        self._file.unlink(missing_ok=True)

    def is_on(self, defect: Enum) -> bool:
        """Whether this defect is on."""
        try:
            return self._file.read_text(encoding="utf-8") == str(defect.value)
        except OSError:
            return False

    def meet(self) -> None:
        """Report that the defect took effect."""
        self._met.touch()

    @property
    def was_met(self) -> bool:
        """Whether the last defect took effect."""
        return self._met.exists()
