"""The catalogue of faults, each with the server on which it is provoked and the code that does it.

Knows all modules with faults. Must not know the check's loads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

from minisgl_backend.errors import ConfigError
from minisgl_check import (
    breaks,
    callers,
    gateway_faults,
    kills,
    model_files,
    no_room,
    nodes,
    ranks,
    replicas,
    stops,
)
from minisgl_check.fault import Scene, nowhere, stage

SHORT: Final = kills.FAULTS
"""Faults on the server that has been under load. After more of them its supervisor would give up.
"""

SCENES: Final[tuple[Scene[Any], ...]] = (
    Scene(stage, callers.FAULTS + gateway_faults.FAULTS + kills.IDLE_FAULTS),
    Scene(stage, kills.HANGS),
    Scene(breaks.frail_stage, breaks.FAULTS),
    Scene(breaks.impatient_stage, breaks.IMPATIENT_FAULTS),
    Scene(breaks.small_stage, breaks.SMALL_FAULTS),
    Scene(ranks.two_ranks, ranks.FAULTS),
    Scene(replicas.two_replicas, replicas.FAULTS),
    Scene(nowhere, nodes.FAULTS),
    Scene(nowhere, stops.FAULTS + model_files.FAULTS + no_room.FAULTS),
)
"""Scenes that each have their own server, or several."""

_ALL: Final[tuple[Scene[Any], ...]] = (Scene(stage, SHORT), *SCENES)

MEASURED: Final = tuple(scene for scene in map(Scene.measured, SCENES) if scene.faults)


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the catalogue; ``extent`` is the shortest check that it is part of."""

    number: str
    sentence: str
    extent: str


def scenes_of(numbers: Collection[str]) -> list[Scene[Any]]:
    """The scenes with the faults of these numbers. Raises ``ConfigError`` if one does not exist."""
    known = {entry.number for entry in entries()}
    if unknown := sorted(set(numbers) - known):
        raise ConfigError(f"there is no fault {', '.join(unknown)}: see minisgl check --list")
    return [found for scene in _ALL if (found := scene.numbered(numbers)).faults]


def entries() -> list[Entry]:
    """All faults, by number."""
    return sorted(_entries(), key=lambda entry: (int(entry.number[1:]), entry.sentence))


def _entries() -> Iterator[Entry]:
    for fault in SHORT:
        yield Entry(fault.number, fault.sentence, "short")
    for scene in SCENES:
        for fault in scene.faults:
            extent = "figures" if fault.has_figures else "full"
            yield Entry(fault.number, fault.sentence, extent)
