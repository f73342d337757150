"""A server's records: its metrics, its log, and its memory over time.

Knows the names of metrics and the words that no log may contain. Must not know cases of load.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np

from minisgl_backend.loopback import open_local
from minisgl_check.case import Case
from minisgl_check.invariants import SPARE, settled
from minisgl_check.target import Stats, Target

_ANSWER_S: Final = 30.0
_COUNTED: Final[Mapping[str, Callable[[Mapping[str, Any]], float]]] = {
    "vllm:num_requests_running": lambda engine: engine["scheduler"]["num_running"],
    "vllm:num_requests_waiting": lambda engine: engine["scheduler"]["num_waiting"],
    "vllm:kv_cache_usage_perc": lambda engine: 0,
    "vllm:prompt_tokens_total": lambda engine: engine["num_prompt_tokens"],
    "vllm:generation_tokens_total": lambda engine: engine["num_generated_tokens"],
    "vllm:prefix_cache_hits_total": lambda engine: engine["scheduler"]["prefix_hits"],
    "vllm:spec_decode_num_draft_tokens_total": lambda engine: engine["scheduler"]["num_guesses"],
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": lambda engine: engine["scheduler"][
        "num_right_guesses"
    ],
    "minisgl:host_cache_saved_tokens_total": lambda engine: engine["scheduler"][
        "host_saved_tokens"
    ],
    "minisgl:host_cache_loaded_tokens_total": lambda engine: engine["scheduler"][
        "host_loaded_tokens"
    ],
    "minisgl:requests_cancelled_total": lambda engine: engine["num_cancelled"],
    "minisgl:requests_retracted_total": lambda engine: engine["scheduler"]["num_retractions"],
}
"""Metrics, each with the engine's own count that it must equal when the engine is idle."""
_SECRETS: Final = ("capital of", "opposite of", "spell banana")
"""Parts of the prompts that are sent."""
_ALARMS: Final = re.compile(
    r"Traceback|double free|freed twice|underflow|corrupt|Segmentation|InvariantError|\bleak"
)
MOST_GROWN: Final = 0.05
"""The share by which memory may grow from the first third of a long run to its end."""


def metrics(target: Target, metrics_url: str) -> Case:
    """The metrics of an idle server are what its engine counts."""
    case = Case("metrics agree with the engine", len(_COUNTED))
    settled(lambda: not _disagreements(target.stats(), _read(metrics_url)))
    case.failures = _disagreements(target.stats(), _read(metrics_url))
    case.what = f"{len(case.failures)} of {len(_COUNTED)} do not"
    return case


def _disagreements(stats: Stats, told: Mapping[str, Mapping[str, float]]) -> list[str]:
    found = []
    for name, count in _COUNTED.items():
        expected = count(stats.engine)
        series = told.get(name, {})
        if not series or sum(series.values()) != expected:
            values = ", ".join(f"{value:g} {labels}" for labels, value in series.items())
            found.append(f"{name} is {values or 'missing'}, the engine says {expected}")
    return found


def _read(url: str) -> dict[str, dict[str, float]]:
    """The values of each metric by its labels."""
    with open_local(url, timeout_s=_ANSWER_S) as response:
        text = response.read().decode()
    found: dict[str, dict[str, float]] = {}
    for name, labels, value in re.findall(r"^([a-z_:]+)(\{[^}]*\})? (\S+)$", text, re.M):
        found.setdefault(name, {})[labels] = float(value)
    return found


def log(lines: Iterable[str]) -> Case:
    """The log of a server without faults has no alarms, and nothing from a prompt."""
    case = Case("the server's log")
    for line in lines:
        case.count += 1
        if alarm := _ALARMS.search(line):
            case.expect(False, f"{alarm[0]!r} in {line[:200]!r}")
        for secret in _SECRETS:
            case.expect(secret not in line, f"a prompt in {line[:200]!r}")
    case.what = f"{len(case.failures)} alarms"
    return case


_SHOWN: Final = (
    "MB of shared memory",
    "free or cached pages",
    "rows",
    "threads",
    "descriptors",
    "retractions",
)


class Footprints:
    """The resources of all processes in the course of a run; the first reading is of its start."""

    def __init__(self, target: Target) -> None:
        self._begin_s = time.monotonic()
        self._readings: list[dict[str, float]] = []
        self.read(target)

    def read(self, target: Target) -> str:
        """Take a reading, and return it in words; there is none while the engine is reloaded."""
        stats = target.stats()
        scheduler = stats.engine.get("scheduler")
        if scheduler is None:
            return "the engine tells nothing"
        reading = {
            "minutes": (time.monotonic() - self._begin_s) / 60,
            "MB": stats.resident_mb,
            "MB of shared memory": stats.told["shared_memory_bytes"] / 1e6,
            "free or cached pages": scheduler["free_pages"] + scheduler["cached_pages"],
            "rows": scheduler["num_running"],
            "retractions": scheduler["num_retractions"],
        }
        for kind in ("threads", "descriptors"):
            reading[kind] = sum(one.get(f"num_{kind}", 0) for one in stats.processes.values())
        self._readings.append(reading)
        return ", ".join(f"{value:,.6g} {name}" for name, value in reading.items())

    def case(self, *, is_judged: bool) -> Case:
        """The result. Only growth after the first third, in which caches fill, is judged.

        The lowest of several readings shows what is never freed: Triton keeps tens of megabytes of
        a large request for a while.
        """
        first, last = self._readings[0], self._readings[-1]
        kept = self._readings[len(self._readings) // 3 :]
        num = max(1, len(kept) // 4)

        def grown(kind: str) -> tuple[float, float]:
            """The value after the first third, and how much more it is at the end."""
            before, after = (min(it[kind] for it in some) for some in (kept[:num], kept[-num:]))
            return before, after - before

        minutes = np.array([reading["minutes"] for reading in kept])
        mb = np.array([reading["MB"] for reading in kept])
        slope = float(np.polyfit(minutes, mb, 1)[0]) if len(kept) > 1 else 0.0
        before_mb, more_mb = grown("MB")
        case = Case("memory", len(self._readings))
        case.what = f"{last['MB']:.0f} MB at the end, {more_mb:+.1f} since the first third"
        case.figures = {"memory at the end, MB": last["MB"], "memory slope, MB/min": slope}
        for kind in _SHOWN:
            case.figures[f"{kind}, more than at the start"] = last[kind] - first[kind]
        if not is_judged:
            return case
        case.expect(
            more_mb <= MOST_GROWN * before_mb, f"grew by {more_mb:.0f} MB of {before_mb:.0f}"
        )
        for kind in ("threads", "descriptors"):
            before, more = grown(kind)
            case.expect(more <= SPARE, f"{more:.0f} more {kind} than {before:.0f}")
        return case
