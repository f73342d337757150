"""Sends the catalogues of bad inputs to a server and judges each ending.

A refusal must be one short sentence with the right code, reveal nothing internal, come at once, and
leave the server ready. Must not know what the catalogues hold.
"""

from __future__ import annotations

import json
import random
import re
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Final

from minisgl_backend.errors import EngineFailure
from minisgl_check.bad_inputs import Expected, catalogue
from minisgl_check.bad_wire import bodies, largest, messages, odd_messages
from minisgl_check.case import Case
from minisgl_check.gateway_inputs import GatewayRequest, own_inputs, translated, without_a_key
from minisgl_check.hostile_grammars import Form, hostile_grammar
from minisgl_check.raw_calls import (
    Ending,
    GrpcCaller,
    HttpCaller,
    grpc_of,
    half_a_message,
    json_of,
)
from minisgl_check.target import Target
from minisgl_kit.own_gateway import gateway_of
from minisgl_kit.report import percentiles

_INSIDE: Final = re.compile(
    r"Traceback|File \"|\.py\b|\bshm\b|/dev/|/(?:tmp|home|root|usr|opt|var|proc)/|0x[0-9a-f]{6}|\n"
)
"""Text that reveals the inside of a server."""
_MOST_CHARACTERS: Final = 400
_CLAIMED: Final = 2**31 - 1
"""The most bytes that Triton accepts in one message."""
_WARMING: Final = 16
_NUM_HOSTILE_CLIENTS: Final = 3
"""Simultaneous clients: few enough to leave one row for others."""
_MOST_GROWN_MB: Final = 150.0
_CODED: Final = re.compile(r"(?:in ensemble '\w+', )?([A-Z_]+): \S")
PROMISED_S: Final = 1.0
"""A refusal must come within this time; so must the answer to an odd but valid request."""


def faults_of(ending: Ending, expected: Expected) -> list[str]:
    """What is wrong with the ending of a request that should have ended as ``expected``."""
    error = ending.error
    if error is None:
        is_good = expected in (Expected.ANSWER, Expected.SURVIVED)
        return [] if is_good else ["was answered"]
    found = []
    if expected is Expected.ANSWER:
        found.append(f"was refused: {error[:200]}")
    if expected is not Expected.CLOSED and error.startswith("no answer: "):
        found.append(error[:200])
    if expected in (Expected.INVALID, Expected.UNSUPPORTED, Expected.REFUSED):
        coded = _CODED.match(error)
        if coded is None or coded[1] not in expected.value.split(" or "):
            found.append(f"is not {expected.value}: {error[:200]}")
    return found + _faults_of_text(error)


def _faults_of_text(error: str) -> list[str]:
    found = []
    if len(error) > _MOST_CHARACTERS:
        found.append(f"an error of {len(error)} characters: {error[:80]}...")
    if inside := _INSIDE.search(error.rstrip("\n")):
        found.append(f"tells {inside[0]!r}: {error[:200]}")
    return found


def send_largest(target: Target) -> None:
    """Send the largest request once: Triton takes memory for it that it never frees."""
    body = largest()
    HttpCaller(target.http_url).send(body.content, headers=body.headers)


def bad_inputs(target: Target, *, is_timed: bool) -> list[Case]:
    """Everything that is wrong or odd, each over HTTP and, if it can be, over gRPC.

    ``is_timed``: slow refusals are failures, too; on a busy machine they are not.
    """
    stats = target.stats()
    requests = catalogue(
        vocab_size=stats.info["vocab_size"],
        context=stats.info["max_sequence_length"],
        num_positions=stats.num_positions,
    )
    http = HttpCaller(target.http_url)
    grpc = GrpcCaller(target.grpc_address)
    over_http = _Tries("bad inputs over HTTP", is_timed, target.is_ready)
    over_grpc = _Tries("bad inputs over gRPC", is_timed, target.is_ready)
    with closing(grpc), over_grpc.until_gone():
        for bad in requests:
            body, message = json_of(bad.values), grpc_of(bad.values)
            if body is not None:
                ending = http.send(body)
                over_http.add(bad.name, ending, faults_of(ending, bad.expected))
            if message is not None:
                # a tensor or a parameter may be able to carry what Triton's JSON cannot
                ending = grpc.send(message)
                over_grpc.add(bad.name, ending, faults_of(ending, bad.expected))
        for raw in bodies():
            ending = http.send(raw.content, path=raw.path, method=raw.method, headers=raw.headers)
            over_http.add(raw.name, ending, faults_of(ending, raw.expected))
        for name, data in messages():
            ending = grpc.send(data)
            over_grpc.add(name, ending, faults_of(ending, Expected.TRITON))
        for name, data in odd_messages():
            ending = grpc.send(data)
            over_grpc.add(name, ending, faults_of(ending, Expected.ANSWER))
        with half_a_message(target.grpc_address, _CLAIMED):
            ending = grpc.send(data)
            grown_mb = target.stats().resident_mb - stats.resident_mb
        found = faults_of(ending, Expected.ANSWER)
        if grown_mb > _CLAIMED / 2e6:
            found.append(f"memory grew by {grown_mb:.0f} MB")
        over_grpc.add("beside a message of 2 GB that never comes", ending, found)
    return [over_http.case(), over_grpc.case()]


def warm_grammars(target: Target) -> None:
    """Let the engine start everything that compiles grammars; it keeps this from then on."""

    def ask(number: int) -> None:
        HttpCaller(target.http_url).send(_formed({"choice": [f"{number}"]}))

    with ThreadPoolExecutor(_WARMING) as pool:
        list(pool.map(ask, range(_WARMING)))


def hostile_grammars(
    target: Target, count: int, rng: random.Random, *, is_timed: bool
) -> list[Case]:
    """Grammars that may take long, take much memory, or break what compiles them."""
    tries = _Tries("hostile grammars", is_timed, target.is_ready)
    http = HttpCaller(target.http_url)
    seed = rng.randrange(2**31)

    def send(index: int) -> tuple[str, Ending]:
        name, form = hostile_grammar(random.Random(seed + index))
        return name, http.send(_formed(form))

    took_ms = []
    begin_mb = target.stats().resident_mb
    end_mb: float | None = None
    with tries.until_gone():
        with ThreadPoolExecutor(_NUM_HOSTILE_CLIENTS) as pool:
            for index, (name, ending) in enumerate(pool.map(send, range(count))):
                if index == count // 3:  # by now the most grammars possible are kept
                    begin_mb = target.stats().resident_mb
                took_ms.append(1e3 * ending.seconds)
                tries.add(f"{name} {index}", ending, faults_of(ending, Expected.SURVIVED))
        end_mb = target.stats().resident_mb
    case = tries.case()
    if end_mb is not None:
        grown_mb = end_mb - begin_mb
        case.expect(grown_mb < _MOST_GROWN_MB, f"memory grew by {grown_mb:.0f} MB")
        case.figures["hostile grammars, MB grown"] = round(grown_mb, 1)
    for name, milliseconds in percentiles(took_ms).items():
        case.figures[f"hostile grammars, {name}, ms"] = round(milliseconds, 1)
    return [case]


def _formed(form: Form) -> bytes:
    """A request for a short answer in this form."""
    values = {"text_input": "Hello", "max_tokens": 6, "structured_outputs": json.dumps(form)}
    body = json_of(values)
    assert body is not None
    return body


def bad_gateway_inputs(target: Target, *, is_timed: bool) -> list[Case]:
    """The same, as far as OpenAI's API can express it, through a gateway; and keys."""
    stats = target.stats()
    requests = catalogue(
        vocab_size=stats.info["vocab_size"],
        context=stats.info["max_sequence_length"],
        num_positions=stats.num_positions,
    )
    key = secrets.token_urlsafe(12)
    with (
        tempfile.NamedTemporaryFile("w", encoding="utf-8") as keys,
        gateway_of(target.grpc_address) as gateway,
    ):
        keys.write(key)
        keys.flush()
        tries = _Tries("bad inputs over the gateway", is_timed, gateway.is_alive)
        with tries.until_gone():
            tries.ask(HttpCaller(gateway.url), [*translated(requests), *own_inputs()])
            with gateway_of(target.grpc_address, "--api-key-file", keys.name) as guarded:
                tries.ask(HttpCaller(guarded.url), without_a_key(key))
    return [tries.case()]


class _Tries:
    """The requests over one protocol, and their endings."""

    def __init__(self, name: str, is_timed: bool, is_ready: Callable[[], bool]) -> None:
        self._case = Case(name)
        self._is_ready = is_ready
        self._is_timed = is_timed
        self._slowest = (0.0, "")
        self._num_clean = 0

    @contextmanager
    def until_gone(self) -> Iterator[None]:
        """If nothing answers any more, the block ends, and that is a failure beside those found."""
        try:
            yield
        except EngineFailure as error:
            self._case.failures.append(str(error))
        except OSError as error:
            self._case.failures.append(f"nothing answers any more: {error}")

    def add(self, name: str, ending: Ending, found: list[str]) -> None:
        """Note how a request ended, and what is wrong with that.

        Raises ``EngineFailure``, which names the request, if the server is gone.
        """
        self._case.count += 1
        self._case.ended["refused" if ending.error else "answered"] += 1
        self._slowest = max(self._slowest, (ending.seconds, name))
        if self._is_timed and ending.seconds > PROMISED_S:
            found.append(f"took {ending.seconds:.1f} s")
        try:
            if not self._is_ready():
                found.append("the server is no longer ready")
        except OSError as error:
            raise EngineFailure(f"nothing answers after {name!r}: {error}") from None
        finally:
            self._case.failures += [f"{name}: {one}" for one in found]
        self._num_clean += not found

    def ask(self, caller: HttpCaller, requests: Iterable[GatewayRequest]) -> None:
        """Send them to a gateway, and judge them by their status."""
        for one in requests:
            ending = caller.send(one.content, path=one.path, method=one.method, headers=one.headers)
            found = _faults_of_text(ending.error or "")
            if ending.status not in one.statuses:
                found.append(f"a status of {ending.status}: {(ending.error or '')[:200]}")
            self.add(one.name, ending, found)

    def case(self) -> Case:
        """The result."""
        case, (seconds, name) = self._case, self._slowest
        case.what = f"slowest {1e3 * seconds:,.0f} ms ({name})"
        case.figures = {f"{case.name}, tried": case.count, f"{case.name}, clean": self._num_clean}
        return case
