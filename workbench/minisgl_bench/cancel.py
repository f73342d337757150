"""`minisgl bench cancel`: how long the engine works for a client that has gone.

A real tritonserver serves the ensemble `minisgl` with a paced engine of two rows, so that each
phase of a request lasts long enough to be hit. The time runs from just before the client goes away
until the planner has ended the request, by the planner's own journal, on the clock that both
processes share. The client leaves at a random moment within the phase, up to 0.3 s after it began.

    grpc-cancel    cancels its gRPC stream
    grpc-kill      is a process that gets SIGKILL
    http-close     closes its connection to Triton's generate_stream
    gateway-close  closes its connection to the OpenAI-compatible gateway

    queued        two other requests hold all rows
    prefill       the prompt is being computed, 16 tokens a step
    first-token   the client has had the first response
    later-token   the client has had ten
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
from minisgl_client.request import build
from rich.progress import Progress

from minisgl_backend.cli.options import tritonserver_option
from minisgl_backend.errors import EngineFailure
from minisgl_backend.loopback import open_local
from minisgl_backend.server.process import TritonServer
from minisgl_bench.journal import Entry, Journal
from minisgl_bench.servers import started_paced
from minisgl_kit.leaving import EventStreamClose, GrpcCancel, GrpcKill, Leaving
from minisgl_kit.option_types import POSITIVE, POSITIVE_INT
from minisgl_kit.own_gateway import Gateway, gateway_of
from minisgl_kit.report import Report, json_option

WAYS: Final = ("grpc-cancel", "grpc-kill", "http-close", "gateway-close")
PHASES: Final = ("queued", "prefill", "first-token", "later-token")

_NUM_ROWS: Final = 2
_PREFILL_TOKENS: Final = 16
_PREFILL_STEPS: Final = 100
_LATER: Final = 10
_MAX_TOKENS: Final = 6000
_LEAVES_WITHIN_S: Final = 0.3
_SETTLES_WITHIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Ending:
    """How the engine ended a request after its client had gone; times in seconds from that moment.

    ``ended_s`` is None if the request had not ended within the patience; ``returned_s`` is None if
    its rows and pages were not back by then.
    """

    ended_s: float | None
    returned_s: float | None
    num_tokens_after: int


@click.command()
@click.option("--ways", default=",".join(WAYS), show_default=True, help="how clients leave")
@click.option("--phases", default=",".join(PHASES), show_default=True, help="when they leave")
@click.option(
    "--repeats", type=POSITIVE_INT, default=20, show_default=True, help="clients a way and phase"
)
@click.option(
    "--step-ms", type=POSITIVE, default=20.0, show_default=True, help="time of an engine step"
)
@click.option(
    "--patience", type=POSITIVE, default=5.0, show_default=True, help="seconds to wait for an end"
)
@click.option("--seed", default=0, show_default=True, help="of the moments of leaving")
@tritonserver_option
@json_option
def cancel(
    ways: str,
    phases: str,
    repeats: int,
    step_ms: float,
    patience: float,
    seed: int,
    tritonserver: str | None,
    json_path: Path | None,
) -> None:
    """Time from a client's departure to the end of its request in the engine."""
    pairs = [(way, phase) for way in _words(ways, WAYS) for phase in _words(phases, PHASES)]
    report = Report("cancel", info={"step": f"{step_ms:g} ms", "repeats": repeats})
    options = {
        "max_running_requests": str(_NUM_ROWS),
        "max_prefill_tokens": str(_PREFILL_TOKENS),
        "cache": "naive",  # so that each prompt is computed, and idle means that no page is held
    }
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="minisgl-bench-"))
        path = Path(folder) / "journal.jsonl"
        journal = Journal(path)
        stack.callback(journal.close)
        server = stack.enter_context(
            started_paced(options, step_s=step_ms / 1000, journal=path, tritonserver=tritonserver)
        )
        own_gateway = None
        if any(way == "gateway-close" for way, _ in pairs):
            address = f"127.0.0.1:{server.grpc_port}"
            own_gateway = stack.enter_context(gateway_of(address))
        bench = Bench(server, own_gateway, journal, random.Random(seed), patience)
        with Progress(transient=True) as progress:
            task = progress.add_task("leaving", total=len(pairs) * repeats)
            for way, phase in pairs:
                endings = []
                with bench.rows_taken(_NUM_ROWS if phase == "queued" else 0):
                    for _ in range(repeats):
                        endings.append(bench.leave_once(way, phase))
                        progress.advance(task)
                report.add(way=way, phase=phase, **summary(endings))
    report.emit(json_path)


def summary(endings: list[Ending]) -> dict[str, Any]:
    """The figures of one way and phase; times in milliseconds, ``-`` if nothing ended."""
    ended_ms = [1e3 * ending.ended_s for ending in endings if ending.ended_s is not None]
    returned_ms = [1e3 * ending.returned_s for ending in endings if ending.returned_s is not None]
    return {
        "ended": f"{len(ended_ms)}/{len(endings)}",
        "p50_ms": statistics.median(ended_ms) if ended_ms else "-",
        "max_ms": max(ended_ms, default="-"),
        "rows_and_pages_back": f"{len(returned_ms)}/{len(endings)}",
        "back_max_ms": max(returned_ms, default="-"),
        "max_tokens_after": max(ending.num_tokens_after for ending in endings),
    }


class Bench:
    """Clients that come and go, one after the other, while the planner's journal is read."""

    def __init__(
        self,
        server: TritonServer,
        gateway: Gateway | None,
        journal: Journal,
        moments: random.Random,
        patience_s: float,
    ) -> None:
        self._server = server
        self._gateway = gateway
        self._journal = journal
        self._moments = moments
        self._patience_s = patience_s
        self._num_clients = 0

    @contextmanager
    def rows_taken(self, num_rows: int) -> Iterator[None]:
        """``num_rows`` requests decode while the block runs."""
        mark = len(self._journal.read())
        others = [self._ask("grpc-cancel", num_prompt_tokens=1) for _ in range(num_rows)]
        for other in others:
            other.next()
        yield
        for other in others:
            other.leave()
        if others:
            self._expect(_is_idle, "all rows free", since=mark)

    def leave_once(self, way: str, phase: str) -> Ending:
        """One client sends a request, waits for that phase of it, and leaves."""
        mark = len(self._journal.read())
        steps = _PREFILL_STEPS if phase == "prefill" else 1
        client = self._ask(way, num_prompt_tokens=steps * _PREFILL_TOKENS)
        try:
            added = self._expect(_is("added"), "a request", since=mark)
            (victim,) = added.request_ids
            if phase == "prefill":
                self._expect(_is("admitted", victim), "its admission", since=mark)
            elif phase != "queued":
                for _ in range(1 if phase == "first-token" else _LATER):
                    client.next()
            time.sleep(self._moments.uniform(0, _LEAVES_WITHIN_S))
            left = len(self._journal.read())
            left_s = time.monotonic()
        finally:
            client.leave()
        aborted = self._journal.find(_is("aborted", victim), since=left, timeout_s=self._patience_s)
        # a request in the queue holds nothing that could come back
        back = aborted
        if aborted is not None and phase != "queued":
            back = self._journal.find(_is_idle, since=left, timeout_s=self._patience_s)
        if aborted is None:
            self._stop(self._num_clients)
            self._expect(_is("aborted", victim), "its end when it was stopped", since=left)
        sampled = [entry for entry in self._journal.read()[left:] if entry.what == "sampled"]
        return Ending(
            ended_s=aborted.time_s - left_s if aborted is not None else None,
            returned_s=back.time_s - left_s if back is not None else None,
            num_tokens_after=sum(victim in entry.request_ids for entry in sampled),
        )

    def _ask(self, way: str, *, num_prompt_tokens: int) -> Leaving:
        self._num_clients += 1
        name, prompt = str(self._num_clients), [7] * num_prompt_tokens
        values = {"max_tokens": _MAX_TOKENS, "stream": True}
        if way == "http-close":
            address = f"127.0.0.1:{self._server.http_port}"
            body = {"id": name, "input_ids": prompt, **values}
            return EventStreamClose(address, "/v2/models/minisgl/generate_stream", body)
        if way == "gateway-close":
            assert self._gateway is not None
            body = {"model": "minisgl", "prompt": prompt, **values}
            return EventStreamClose(self._gateway.address, "/v1/completions", body)
        client = GrpcKill if way == "grpc-kill" else GrpcCancel
        request = build("minisgl", name, {"input_ids": prompt, **values})
        return client(f"127.0.0.1:{self._server.grpc_port}", request.to_grpc(None))

    def _stop(self, number: int) -> None:
        """End the request of a client whose departure went unnoticed."""
        url = self._server.url("/v2/models/minisgl/generate")
        body = f'{{"id": "{number}", "stop_request": true}}'.encode()
        with open_local(urllib.request.Request(url, body), timeout_s=_SETTLES_WITHIN_S):
            pass

    def _expect(self, condition: Callable[[Entry], bool], what: str, *, since: int) -> Entry:
        entry = self._journal.find(condition, since=since, timeout_s=_SETTLES_WITHIN_S)
        if entry is None:
            raise EngineFailure(f"never came: {what}")
        return entry


def _is(what: str, request_id: int | None = None) -> Callable[[Entry], bool]:
    return lambda entry: (
        entry.what == what and (request_id is None or request_id in entry.request_ids)
    )


def _is_idle(entry: Entry) -> bool:
    return entry.num_running == 0 and entry.num_used_pages == 0


def _words(text: str, known: tuple[str, ...]) -> list[str]:
    words = text.split(",")
    for word in words:
        if word not in known:
            raise click.UsageError(f"{word!r} is none of {', '.join(known)}")
    return words
