"""Sends the catalogues to a server and judges each ending.

A refusal must be one short sentence with the right code, tell nothing of the inside, come at once,
and leave the server ready. Must not know what the catalogues hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from minisgl_backend.check.bad_inputs import Expected, catalogue
from minisgl_backend.check.bad_wire import bodies, messages
from minisgl_backend.check.calls import Ending, GrpcCaller, HttpCaller, grpc_message, json_of
from minisgl_backend.check.case import Case
from minisgl_backend.check.target import Target

_INSIDE: Final = re.compile(
    r"Traceback|File \"|\.py\b|\bshm\b|/dev/|/(?:tmp|home|root|usr|opt|var|proc)/|0x[0-9a-f]{6}|\n"
)
"""What the inside of a server looks like."""
_MOST_CHARACTERS: Final = 400
_CODED: Final = re.compile(r"(?:in ensemble '\w+', )?([A-Z_]+): \S")
PROMISED_S: Final = 1.0
"""A refusal comes within that time; so does the answer to what is odd but right."""


def faults_of(ending: Ending, expected: Expected) -> list[str]:
    """What is wrong with the ending of a request of which that was expected."""
    error = ending.error
    if error is None:
        is_good = expected in (Expected.ANSWER, Expected.SURVIVED)
        return [] if is_good else ["was answered"]
    found = []
    if expected is Expected.ANSWER:
        found.append(f"was refused: {error[:200]}")
    if expected is not Expected.CLOSED and error.startswith("no answer: "):
        found.append(error[:200])
    if expected in (Expected.INVALID, Expected.UNSUPPORTED):
        coded = _CODED.match(error)
        if coded is None or coded[1] != expected.value:
            found.append(f"is not {expected.value}: {error[:200]}")
    if len(error) > _MOST_CHARACTERS:
        found.append(f"an error of {len(error)} characters: {error[:80]}...")
    if inside := _INSIDE.search(error.rstrip("\n")):
        found.append(f"tells {inside[0]!r}: {error[:200]}")
    return found


def bad_inputs(target: Target, *, is_timed: bool) -> list[Case]:
    """Everything that is wrong or odd, each over HTTP and where it can be over gRPC.

    ``is_timed``: slow refusals are failures too, as they are not on a busy machine.
    """
    stats = target.stats()
    requests = catalogue(
        vocab_size=stats.info["vocab_size"],
        context=stats.info["max_sequence_length"],
        num_positions=stats.num_positions,
    )
    http = HttpCaller(target.http_url)
    grpc = GrpcCaller(target.grpc_address)
    over_http = _Tries("bad inputs over HTTP", target, is_timed)
    over_grpc = _Tries("bad inputs over gRPC", target, is_timed)
    try:
        for bad in requests:
            body, message = json_of(bad.values), grpc_message(bad.values)
            if body is not None:
                over_http.add(bad.name, http.send(body), bad.expected)
            if message is not None:
                data = message.SerializeToString()
                # what JSON cannot say to Triton, a tensor or a parameter may say well
                over_grpc.add(bad.name, grpc.send(data), bad.expected)
        for raw in bodies():
            ending = http.send(raw.content, path=raw.path, method=raw.method, headers=raw.headers)
            over_http.add(raw.name, ending, raw.expected)
        for name, data in messages():
            over_grpc.add(name, grpc.send(data), Expected.TRITON)
    finally:
        grpc.close()
    return [over_http.case(), over_grpc.case()]


class _Tries:
    """What became of the requests of one way in."""

    def __init__(self, name: str, target: Target, is_timed: bool) -> None:
        self._case = Case(name)
        self._is_ready: Callable[[], bool] = target.is_ready
        self._is_timed = is_timed
        self._slowest = (0.0, "")

    def add(self, name: str, ending: Ending, expected: Expected) -> None:
        """Judge one."""
        self._case.count += 1
        self._case.ended["refused" if ending.error else "answered"] += 1
        self._slowest = max(self._slowest, (ending.seconds, name))
        found = faults_of(ending, expected)
        if self._is_timed and ending.seconds > PROMISED_S:
            found.append(f"took {ending.seconds:.1f} s")
        if not self._is_ready():
            found.append("the server is not ready any more")
        self._case.failures += [f"{name}: {one}" for one in found]

    def case(self) -> Case:
        """The result."""
        case, (seconds, name) = self._case, self._slowest
        num_clean = case.count - len({one.split(":")[0] for one in case.failures})
        case.what = f"slowest {1e3 * seconds:,.0f} ms ({name})"
        case.figures = {f"{case.name}, tried": case.count, f"{case.name}, clean": num_clean}
        return case
