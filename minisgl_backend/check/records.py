"""What a server writes down: its metrics, its log, and how its memory went.

Knows the names of metrics and the words that no log may have. Must not know cases of load.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np

from minisgl_backend.check.case import Case
from minisgl_backend.check.invariants import settled
from minisgl_backend.check.target import Stats, Target
from minisgl_backend.loopback import open_local

_ANSWER_S: Final = 30.0
_COUNTED: Final[Mapping[str, Callable[[Mapping[str, Any]], float]]] = {
    "vllm:num_requests_running": lambda engine: engine["scheduler"]["num_running"],
    "vllm:num_requests_waiting": lambda engine: engine["scheduler"]["num_waiting"],
    "vllm:kv_cache_usage_perc": lambda engine: 0,
    "vllm:prompt_tokens_total": lambda engine: engine["num_prompt_tokens"],
    "vllm:generation_tokens_total": lambda engine: engine["num_generated_tokens"],
    "vllm:prefix_cache_hits_total": lambda engine: engine["scheduler"]["prefix_hits"],
    "minisgl:requests_cancelled_total": lambda engine: engine["num_cancelled"],
    "minisgl:requests_retracted_total": lambda engine: engine["scheduler"]["num_retractions"],
}
"""A metric, and what the engine says of the same when it is idle."""
_SECRETS: Final = ("capital of", "opposite of", "spell banana")
"""Parts of the prompts that are asked."""
_ALARMS: Final = re.compile(
    r"Traceback|double free|freed twice|underflow|corrupt|Segmentation|InvariantError|\bleak"
)
MOST_GROWN: Final = 0.05
"""Of the memory, from the middle of a long run to its end."""


def metrics(target: Target, metrics_url: str) -> Case:
    """The metrics of an idle server are what its engine counts."""
    case = Case("metrics agree with the engine", len(_COUNTED))
    settled(lambda: not _disagreements(target.stats(), _read(metrics_url)))
    case.failures = _disagreements(target.stats(), _read(metrics_url))
    case.what = f"{len(case.failures)} of {len(_COUNTED)} do not"
    return case


def _disagreements(stats: Stats, told: Mapping[str, float]) -> list[str]:
    found = []
    for name, count in _COUNTED.items():
        expected = count(stats.engine)
        if told.get(name) != expected:
            found.append(f"{name} is {told.get(name)}, the engine says {expected}")
    return found


def _read(url: str) -> dict[str, float]:
    """The sum over all labels of each metric."""
    with open_local(url, timeout_s=_ANSWER_S) as response:
        text = response.read().decode()
    sums: dict[str, float] = {}
    for name, value in re.findall(r"^([a-z_:]+)(?:\{[^}]*\})? (\S+)$", text, re.M):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def log(lines: Iterable[str]) -> Case:
    """A log of a server without faults has no alarm in it, and nothing of a prompt."""
    case = Case("the server's log")
    for line in lines:
        case.count += 1
        if alarm := _ALARMS.search(line):
            case.expect(False, f"{alarm[0]!r} in {line[:200]!r}")
        for secret in _SECRETS:
            case.expect(secret not in line, f"a prompt in {line[:200]!r}")
    case.what = f"{len(case.failures)} alarms"
    return case


class Memory:
    """Readings of the memory of all processes."""

    def __init__(self) -> None:
        self._minutes: list[float] = []
        self._mb: list[float] = []

    def read(self, target: Target) -> None:
        """One reading."""
        self._minutes.append(time.monotonic() / 60)
        self._mb.append(target.stats().resident_mb)

    def case(self, *, is_judged: bool) -> Case:
        """How it went, without the first third, in which caches fill."""
        case = Case("memory", len(self._mb))
        start = len(self._mb) // 3
        minutes, mb = np.array(self._minutes[start:]), np.array(self._mb[start:])
        slope = float(np.polyfit(minutes - minutes[0], mb, 1)[0]) if len(mb) > 1 else 0.0
        middle = float(mb[: max(1, len(mb) // 4)].mean())
        grown = float(mb[-1]) - middle
        case.what = f"{mb[-1]:.0f} MB at the end, {grown:+.1f} since the first third"
        case.figures = {"memory at the end, MB": float(mb[-1]), "memory slope, MB/min": slope}
        if is_judged:
            case.expect(grown <= MOST_GROWN * middle, f"grew by {grown:.0f} MB of {middle:.0f}")
        return case
