"""Processes that are killed or stopped, while requests are open or none are.

Knows processes and signals. Each caller must learn of a fault, the health port must say so, and
afterwards new requests must be served, and nothing of the dead process may be left.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from dataclasses import dataclass
from functools import partial
from signal import SIGCONT, SIGKILL, SIGSEGV, SIGSTOP
from typing import Final, NamedTuple

from minisgl_client.client import Client
from minisgl_client.errors import MinisglError

from minisgl_check.case import Case
from minisgl_check.fault import Fault, Stage
from minisgl_check.processes import runs
from minisgl_check.waiting import wait_until

NOTICED_WITHIN_S: Final = 2.0
HANG_NOTICED_WITHIN_S: Final = 10.0
SERVER_HANG_NOTICED_WITHIN_S: Final = 25.0
TOLD_WITHIN_S: Final = 5.0
RECOVERED_WITHIN_S: Final = 15.0
GONE_WITHIN_S: Final = 60.0
"""Usually a moment, but machines may be busy."""
PAUSE_S: Final = 3.0
"""Too short to be a hang: answers may come later, but nothing else may happen."""
_NUM_STREAMS: Final = 16
_LONG: Final = 600
_WHOLE: Final = 150
"""Tokens of a stream that may well reach its end."""
_STARTED_S: Final = 60.0


def paused(stage: Stage, case: Case) -> None:
    """The engine's process stands still for a while."""
    own = stage.own
    num_before = own.stats().told["num_recoveries"]
    with Client(own.grpc_address, retries=0) as client:
        stream = client.stream(input_ids=[1, 2, 3], max_tokens=_LONG, ignore_eos=True)
        next(stream)
        pid = own.send("llm_engine", SIGSTOP)
        try:
            alarmed = wait_until(lambda: not own.is_ready(), PAUSE_S)
        finally:
            os.kill(pid, SIGCONT)
        case.expect(not alarmed, "a pause was taken for a hang")
        case.count = 1
        try:
            for _ in stream:
                pass
            num_tokens = stream.result.num_output_tokens
            case.ended["answered"] += 1
            case.expect(num_tokens == _LONG, f"the stream ended after {num_tokens} tokens")
        except MinisglError as error:
            case.expect(False, f"the stream ended with {error.code}")
    num_recoveries = own.stats().told["num_recoveries"] - num_before
    case.expect(num_recoveries == 0, f"{num_recoveries} recoveries")
    case.what = "the stream went on"


def killed(
    model: str, *, number: int = SIGKILL, num_streams: int = _NUM_STREAMS
) -> Callable[[Stage, Case], None]:
    """A fault: a deadly signal for a model's process, with ``num_streams`` open."""

    def provoke(stage: Stage, case: Case) -> None:
        # if a tokenizer has done its work, its callers need not notice
        must_fail = model == "llm_engine"
        num_tokens = _WHOLE if model == "tokenizer" else _LONG
        kill = partial(stage.own.send, model, number)
        _dead(
            stage,
            case,
            kill,
            num_streams=num_streams,
            num_tokens=num_tokens,
            must_fail=must_fail,
        )

    return provoke


def hung(stage: Stage, case: Case) -> None:
    """The engine's process stands still for good."""
    kill = partial(stage.own.send, "llm_engine", SIGSTOP)
    _dead(stage, case, kill, must_fail=True, noticed_within_s=HANG_NOTICED_WITHIN_S)


def server_lost(
    number: int, *, noticed_within_s: float = NOTICED_WITHIN_S
) -> Callable[[Stage, Case], None]:
    """A fault: a signal for tritonserver itself; its models' processes must go with it."""

    def provoke(stage: Stage, case: Case) -> None:
        own = stage.own
        models = [own.pid(model) for model in ("llm_engine", "tokenizer", "detokenizer")]

        def kill() -> int:
            pid = own.server.pid
            os.kill(pid, number)
            return pid

        _dead(stage, case, kill, must_fail=True, noticed_within_s=noticed_within_s)
        gone = wait_until(lambda: not any(map(runs, models)), GONE_WITHIN_S)
        case.expect(gone, "processes of its models are still there")

    return provoke


FAULTS: Final = (
    Fault("F3", f"the engine pauses for {PAUSE_S:g} s", paused),
    Fault("F2", "kill -9 of llm_engine with 16 streams", killed("llm_engine")),
    Fault("F4", "kill -9 of tokenizer with 16 streams", killed("tokenizer")),
    Fault("F5", "kill -9 of detokenizer with 16 streams", killed("detokenizer")),
    Fault("F16", "kill -9 of tritonserver with 16 streams", server_lost(SIGKILL)),
)
IDLE_FAULTS: Final = (
    Fault("F1", "kill -9 of llm_engine while idle", killed("llm_engine", num_streams=0)),
    Fault("F1", "kill -9 of tokenizer while idle", killed("tokenizer", num_streams=0)),
    Fault("F1", "kill -9 of detokenizer while idle", killed("detokenizer", num_streams=0)),
    Fault(
        "F1",
        "a segmentation fault of llm_engine while idle",
        killed("llm_engine", number=SIGSEGV, num_streams=0),
    ),
)
HANGS: Final = (
    Fault("F3", "the engine stops for good with 16 streams", hung, has_figures=True),
    Fault(
        "F16",
        "tritonserver stops for good with 16 streams",
        server_lost(SIGSTOP, noticed_within_s=SERVER_HANG_NOTICED_WITHIN_S),
        has_figures=True,
    ),
)


@dataclass(frozen=True, slots=True)
class _Course:
    """What was seen of a kill at ``killed_s``, by ``time.perf_counter``: when the health port
    noticed it and when it had recovered, both in seconds since then, and how all streams ended."""

    pid: int
    killed_s: float
    noticed_s: float
    recovered_s: float
    endings: Sequence[_Ending]

    @property
    def num_failed(self) -> int:
        return sum(bool(one.code) for one in self.endings)

    @property
    def ended_s(self) -> float:
        """When the last stream ended, in seconds since the kill."""
        return max((one.at_s - self.killed_s for one in self.endings), default=0.0)


def _dead(
    stage: Stage,
    case: Case,
    kill: Callable[[], int],
    *,
    must_fail: bool,
    num_streams: int = _NUM_STREAMS,
    num_tokens: int = _LONG,
    noticed_within_s: float = NOTICED_WITHIN_S,
) -> None:
    own, patience_s = stage.own, stage.settings.patience_s
    case.count = max(1, num_streams)
    before = own.server
    course = _course(stage, case, kill, num_streams, num_tokens)
    if num_streams:
        _judge_streams(case, course, num_tokens if must_fail else None)
    case.ended.update(failed=course.num_failed, answered=len(course.endings) - course.num_failed)
    serves = wait_until(own.serves, patience_s)
    case.expect(serves, "new requests are not served")
    gone = wait_until(lambda: not runs(course.pid), GONE_WITHIN_S)
    case.expect(gone, "the process is still there")
    if before is not own.server:
        case.expect(not before.directory.exists(), "the old server's files are still there")
        case.expect(not before.shared_memory_regions(), "its shared memory is still there")
    if serves:
        stage.expect_canary(case)
    case.what = f"ready again after {course.recovered_s:.1f} s"
    if num_streams:
        streams = f"{course.num_failed} of {num_streams} streams failed, the last ended after"
        case.what = f"{streams} {course.ended_s:.1f} s; {case.what}"
    case.figures = {
        f"{case.name}: not ready after, s": course.noticed_s,
        f"{case.name}: ready again after, s": course.recovered_s,
    }
    if stage.settings.is_timed:
        _judge_times(case, course, must_fail=must_fail, noticed_within_s=noticed_within_s)


def _course(
    stage: Stage, case: Case, kill: Callable[[], int], num_streams: int, num_tokens: int
) -> _Course:
    """Open streams, kill, and wait until the server is back and all streams have ended."""
    own, patience_s, num_seen = stage.own, stage.settings.patience_s, _num_seen(stage)
    with (
        Client(own.grpc_address, retries=0) as client,
        ThreadPoolExecutor(max(1, num_streams)) as pool,
    ):
        endings = [pool.submit(_ending, client, num_tokens) for _ in range(num_streams)]
        begun = wait_until(lambda: _num_seen(stage) >= num_seen + num_streams, _STARTED_S)
        case.expect(begun, "the streams did not begin")
        killed_s = time.perf_counter()
        pid = kill()
        noticed = wait_until(lambda: not own.is_ready(), patience_s)
        noticed_s = time.perf_counter() - killed_s
        case.expect(noticed, "the health port never said so")
        back = noticed and wait_until(own.is_ready, patience_s)
        recovered_s = time.perf_counter() - killed_s
        case.expect(back or not noticed, "the health port never said that it is back")
        done, hanging = wait_for_all(endings, patience_s)
        case.expect(not hanging, f"{len(hanging)} callers wait forever")
        if hanging:
            client.close()  # else the pool would wait for them
    return _Course(pid, killed_s, noticed_s, recovered_s, [one.result() for one in done])


def _judge_streams(case: Case, course: _Course, num_tokens: int | None) -> None:
    """``num_tokens``: those of a stream that did not fail; None if no stream must fail."""
    num_hit = sum(one.at_s > course.killed_s for one in course.endings)
    case.expect(num_hit > 0, "no stream was open anymore")
    if num_tokens is None:
        return
    case.expect(course.num_failed > 0, "no stream failed")
    # a complete answer may have come just before
    num_short = sum(not one.code and one.num_tokens != num_tokens for one in course.endings)
    case.expect(num_short == 0, f"{num_short} streams ended short, as if all was well")


def _judge_times(case: Case, course: _Course, *, must_fail: bool, noticed_within_s: float) -> None:
    more_s = max(0.0, noticed_within_s - NOTICED_WITHIN_S)
    case.expect(course.noticed_s <= noticed_within_s, f"noticed after {course.noticed_s:.1f} s")
    if must_fail:
        is_told = course.ended_s - more_s <= TOLD_WITHIN_S
        case.expect(is_told, f"streams ended after {course.ended_s:.1f} s")
    is_back = course.recovered_s - more_s <= RECOVERED_WITHIN_S
    case.expect(is_back, f"ready again after {course.recovered_s:.1f} s")


def _num_seen(stage: Stage) -> int:
    return int(stage.own.stats().engine.get("num_seen", -1))


class _Ending(NamedTuple):
    """How a long answer ended: by an error's code or none, and when, by ``time.perf_counter``."""

    code: str
    at_s: float
    num_tokens: int


def _ending(client: Client, num_tokens: int) -> _Ending:
    code = ""
    with client.stream(input_ids=[1, 2, 3], max_tokens=num_tokens, ignore_eos=True) as stream:
        try:
            for _ in stream:
                pass
        except MinisglError as error:
            code = error.code
    return _Ending(code, time.perf_counter(), stream.result.num_output_tokens or 0)
