"""Clients that leave, in each way, in each phase of their request: time until the engine stops.

Knows the phases as `/stats` shows them. Steps are made slow, so that each phase lasts long enough
to be hit. No client leaves over HTTP before the first response: Triton 24.10 would not notice.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from typing import Any, Final

from minisgl_client.request import build

from minisgl_backend.errors import EngineFailure
from minisgl_check.case import Case
from minisgl_check.defect import Defect
from minisgl_check.fault import Stage
from minisgl_check.leavers import FREED_WITHIN_MS
from minisgl_check.waiting import wait_until
from minisgl_kit.leaving import EventStreamClose, GrpcCancel, Leaving
from minisgl_kit.own_gateway import Gateway, gateway_of

WAYS: Final = ("gRPC", "HTTP", "gateway")
_WAYS_BEFORE: Final = ("gRPC", "gateway")
_REPEATS: Final = 3
_LATER: Final = 10
_LONG: Final = 200
_LATEST_S: Final = 0.1
_TOKENIZED_S: Final = 0.02
_PREFILL_TOKENS: Final = 800
"""Seven chunks."""
_WORDS: Final = 1_500
"""Refused once they are tokenized, which takes a while."""
_SETTLES_S: Final = 30.0


def departures(stage: Stage, case: Case) -> None:
    """Clients leave in each way and phase a few times, at random moments within the phase."""
    freed_ms: dict[str, list[float]] = {}
    with (
        stage.own.switch.on(Defect.SLOW),
        gateway_of(stage.own.grpc_address) as gateway,
    ):
        leaver = _Leaver(stage, gateway)
        for phase in PHASES:
            for way in WAYS if phase in _NUM_READ else _WAYS_BEFORE:
                for _ in range(_REPEATS):
                    freed_ms.setdefault(phase, []).append(leaver.leave(way, phase))
                    case.ended["cut"] += 1
        case.expect(gateway.is_alive(), "the gateway is not well")
    every = sorted(ms for of_phase in freed_ms.values() for ms in of_phase)
    case.count = len(every)
    case.what = f"freed after {statistics.median(every):.0f} ms, at most {every[-1]:.0f}"
    for phase, of_phase in freed_ms.items():
        case.figures[f"left while {phase}: freed p50, ms"] = statistics.median(of_phase)
        case.figures[f"left while {phase}: freed max, ms"] = max(of_phase)
        if stage.settings.is_timed and phase != "tokenizing":  # that is not cut short
            slowest_ms = max(of_phase)
            case.expect(slowest_ms <= FREED_WITHIN_MS, f"{phase}: freed after {slowest_ms:.0f} ms")


class _Leaver:
    """One client after another: each sends a request, waits for a phase of it, and leaves."""

    def __init__(self, stage: Stage, gateway: Gateway) -> None:
        self._own = stage.own
        self._rng = stage.settings.rng
        self._gateway = gateway

    def leave(self, way: str, phase: str) -> float:
        """Milliseconds from the departure until nothing of the request is left."""
        with ExitStack() as stack:
            num_others = int(self._own.stats().info["max_running_requests"])
            if phase == "queued":
                for number in range(num_others):
                    stack.callback(self._ask("gRPC", [9, number]).leave)
                self._until("rows that are taken", lambda: self._num_open() == num_others)
            else:
                num_others = 0
            client = self._ask(way, *PHASES[phase])
            if phase == "tokenizing":
                time.sleep(self._rng.uniform(0, _TOKENIZED_S))
            elif phase in _NUM_READ:
                # the last token may come with the previous one; other streams are long
                may_end = phase == "at the last token"
                with suppress(EngineFailure) if may_end else nullcontext():
                    for _ in range(_NUM_READ[phase]):
                        client.next()
            else:
                self._until("an open request", lambda: self._num_open() == num_others + 1)
                time.sleep(self._rng.uniform(0, _LATEST_S))
            left_s = time.perf_counter()
            client.leave()
            self._until("its end", lambda: self._num_open() + self._num_jobs() == num_others)
            freed_ms = 1e3 * (time.perf_counter() - left_s)
        self._until("the end of the others", lambda: self._num_open() == 0)
        return freed_ms

    def _ask(self, way: str, prompt: list[int] | str, max_tokens: int = _LONG) -> Leaving:
        more: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        if way == "gateway":
            body = {"model": "minisgl", "prompt": prompt, **more}
            return EventStreamClose(self._gateway.address, "/v1/completions", body)
        values = {"text_input" if isinstance(prompt, str) else "input_ids": prompt, **more}
        if way == "HTTP":
            address = self._own.http_url.removeprefix("http://")
            return EventStreamClose(address, "/v2/models/minisgl/generate_stream", values)
        return GrpcCancel(self._own.grpc_address, build("minisgl", "", values).to_grpc(None))

    def _num_open(self) -> int:
        return int(self._own.stats().engine.get("num_open", -1))

    def _num_jobs(self) -> int:
        return int(self._own.stats().process("tokenizer").get("num_jobs", -1))

    def _until(self, what: str, condition: Callable[[], bool]) -> None:
        if not wait_until(condition, _SETTLES_S):
            raise EngineFailure(f"never came: {what}")


PHASES: Final[dict[str, tuple[Any, ...]]] = {
    "queued": ([7] * 50,),
    "tokenizing": ("Straße " * _WORDS,),
    "in prefill": ([7] * _PREFILL_TOKENS,),
    "at the first token": ([7, 8],),
    "at a later token": ([7, 8],),
    "at the last token": ([7, 8], _LATER + 1),
}
"""The phases, and what brings a request into each: the prompt, and the number of tokens."""
_NUM_READ: Final = {"at the first token": 1, "at a later token": 5, "at the last token": _LATER}
"""Number of responses before the client leaves."""
