"""Defects that can be switched on in an engine that was made for it (``frail_model``), by a file.

Knows the file's place: the server's private directory. Must not import the engine.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Final

from minisgl_backend.server.process import TritonServer
from minisgl_backend.server.repository import shipped_repository

MARK: Final = 666_013
"""The seed of a poisoned request."""
STEP_S: Final = 0.02
"""What a step takes at least where steps are slow."""
FILE: Final = "defect"
MET: Final = "defect-met"
"""A file that exists once a defect has taken effect; for defects that may not show otherwise."""

_MODEL: Final = """\
from minisgl_check.frail_model import FrailModel

TritonPythonModel = FrailModel
"""


class Defect(Enum):
    """What is broken."""

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


@contextmanager
def switched_on(defect: Defect, server: TritonServer) -> Iterator[None]:
    """The server's engine has the defect until the block ends, or the server does."""
    file = server.directory / FILE
    (server.directory / MET).unlink(missing_ok=True)
    file.write_text(defect.value, encoding="utf-8")
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def was_met(server: TritonServer) -> bool:
    """Whether the last defect took effect; only some defects report it."""
    return (server.directory / MET).exists()


def frail_repository(folder: Path) -> Path:
    """A model repository whose engine breaks when it is told to."""
    repository = folder / "model_repository"
    shutil.copytree(shipped_repository(), repository)
    (repository / "llm_engine" / "1" / "model.py").write_text(_MODEL, encoding="utf-8")
    return repository
