"""Requests one token from a server, end to end, as a client would, when no request seems to end.

Triton may say that it is ready although no response leaves it, and its models' processes, which
work, do not notice. All that can be seen is that requests are inside one of them and none ends.
Long answers and long prompts look the same. So a separate process requests a token, over gRPC and
over HTTP: then no other process needs gRPC's library, and this one can be killed whatever it waits
for. Any answer will do, even an error. It should come as soon as the request's deadline has passed
and the models get to it; time that the models spend before that does not count against Triton.

The cost is one process at a time, which computes for less than a second and takes two places in the
engine's queue until the deadline. As long as answers come, the pauses between these requests
double. Must not know what is done about a server that does not answer.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from minisgl_backend.death_signal import asking_for
from minisgl_backend.loopback import DIRECT, STREAM_INFER, open_local
from minisgl_backend.runtime_files import OPTIONS_MODEL
from minisgl_backend.server.model_processes import ModelProcess, computed_s, counts_of
from minisgl_backend.server.process import TritonServer

logger = logging.getLogger(__name__)

ASK_AFTER_S: Final = 15.0
"""A token is requested if requests are inside and none has ended for this long."""
_ASK_AT_LEAST_EVERY_S: Final = 120.0
TIMEOUT_S: Final = 2.0
"""The deadline of the request: the engine answers it then, after a few steps, whatever it does."""
OVERDUE_S: Final = 20.0
"""An answer overdue by this much will not come; as long as ``faults.TRITON_HANG_AFTER_S``."""
_FEW_STEPS: Final = 3
"""Steps after which an engine has enforced any deadline: one may run, and one be launched ahead."""
_LOOK_EVERY_S: Final = 1.0
_AT_WORK: Final = 0.02
"""The share of a core that a working process gets even on a busy machine, and that an idle one does
not use."""
_ASKED: Final = "asked"
_WAYS: Final = ("gRPC", "HTTP")


class Asker:
    """Asks one server. Belongs to one thread, and never blocks it for long."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        self._looked_s = time.monotonic()
        self._quiet: dict[int, tuple[int, float]] = {}
        """By process: the number of requests that have ended, and the time since the last one ended
        while others were inside."""
        self._pause_s = ASK_AFTER_S
        self._question: _Question | None = None

    def look(self, processes: Sequence[ModelProcess]) -> str | None:
        """Request a token if it is time to. Returns what is wrong if an answer is overdue. Must be
        called often."""
        now_s = time.monotonic()
        # if this process was paused, the others were not necessarily silent
        passed_s = min(now_s - self._looked_s, _LOOK_EVERY_S)
        self._looked_s = now_s
        if self._question is None:
            if self._is_due(processes, passed_s):
                self._begin()
            return None
        missing = self._question.missing()
        if missing and self._question.is_overdue(processes, passed_s):
            self.close()
            ways = " and ".join(missing)
            return f"tritonserver answers no request over {ways}, whatever it says of itself"
        if not missing or self._question.has_failed:
            self.close()
        return None

    def close(self) -> None:
        """Ask no more."""
        if self._question is not None:
            self._question.close()
            self._question = None

    def _is_due(self, processes: Sequence[ModelProcess], passed_s: float) -> bool:
        quiet: dict[int, tuple[int, float]] = {}
        for process in processes:
            num_ended = _num_ended(process)
            before, so_far_s = self._quiet.get(process.pid, (num_ended, 0.0))
            is_quiet = process.beat.num_inside and num_ended == before
            quiet[process.pid] = num_ended, so_far_s + passed_s if is_quiet else 0.0
        self._quiet = quiet
        longest_s = max((quiet_s for _, quiet_s in quiet.values()), default=0.0)
        if not longest_s:
            self._pause_s = ASK_AFTER_S
        return longest_s >= self._pause_s

    def _begin(self) -> None:
        self._quiet = {}  # the token asked for is no sign of life
        self._pause_s = min(2 * self._pause_s, _ASK_AT_LEAST_EVERY_S)
        try:
            self._question = _Question(self._server)
        except OSError as error:  # no memory, no descriptors, or the directory was removed
            logger.warning("the server cannot be asked for a token: %s", error)


class _Question:
    """One request for a token, by a separate process."""

    def __init__(self, server: TritonServer) -> None:
        """Raises ``OSError`` if the process cannot be started."""
        self._directory = server.directory
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, server.grpc_address, server.url()],
            cwd=server.directory,  # Python imports from there first
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=asking_for(signal.SIGKILL),
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._heard: list[str] = []
        self._waited_s = 0.0
        self._unseen_s = 0.0
        self._overdue_s = 0.0
        self._target: dict[tuple[int, int], int] = {}
        """By process, and replica in it: the number of steps, or of ended requests, at which the
        request for the token must have been processed."""
        self._computed_s: dict[int, float] = {}

    def missing(self) -> list[str]:
        """The protocols over which no answer has come so far."""
        assert self._process.stdout is not None
        self._heard += (self._process.stdout.read() or b"").decode("ascii").split()
        return [way for way in _WAYS if way not in self._heard]

    @property
    def has_failed(self) -> bool:
        """Whether the process ended before it could ask."""
        return _ASKED not in self._heard and self._process.poll() is not None

    def is_overdue(self, processes: Sequence[ModelProcess], passed_s: float) -> bool:
        """Whether an answer should have come. ``passed_s`` is the time since the last call."""
        if _ASKED not in self._heard:
            return False
        self._waited_s += passed_s
        self._unseen_s += passed_s
        if self._waited_s > TIMEOUT_S and self._unseen_s >= _LOOK_EVERY_S:
            try:
                if not any([self._is_at_work(process) for process in processes]):
                    self._overdue_s += self._unseen_s
            except (OSError, ValueError, LookupError):
                pass  # a process does not report its counts, which is noticed elsewhere
            self._unseen_s = 0.0
        return self._overdue_s > OVERDUE_S

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _is_at_work(self, process: ModelProcess) -> bool:
        """Whether the process may not have reached the request yet, but makes progress."""
        if process.model == OPTIONS_MODEL:
            counts = counts_of(self._directory, process)
            # only the steps of the replica that has the request count; it may be any of them
            engines = [replica["stats"] for replica in counts.get("replicas", ())] or [counts]
            return any([self._is_stepping(process.pid, *each) for each in enumerate(engines)])
        target = self._target.setdefault((process.pid, 0), process.beat.num_seen)
        before_s = self._computed_s.get(process.pid, 0.0)
        self._computed_s[process.pid] = now_s = computed_s(process.pid)
        is_computing = now_s - before_s > _AT_WORK * self._unseen_s
        return _num_ended(process) < target and is_computing

    def _is_stepping(self, pid: int, number: int, counts: Mapping[str, Any]) -> bool:
        """Whether an engine has requests, and has not yet run the steps that the request takes."""
        num_steps = int(counts["num_steps"])
        target = self._target.setdefault((pid, number), num_steps + _FEW_STEPS)
        return bool(counts["num_open"]) and num_steps < target


def _num_ended(process: ModelProcess) -> int:
    return process.beat.num_seen - process.beat.num_inside


# --- the process that asks ------------------------------------------------------------------------


def main(grpc_address: str, http_url: str) -> None:
    """Request a token over each protocol, and print the protocol as soon as an answer comes."""
    import grpc
    from tritonclient.grpc import service_pb2

    values = {"max_tokens": 1, "timeout_ms": int(1000 * TIMEOUT_S)}
    message = service_pb2.ModelInferRequest(model_name="minisgl", id="supervisor")
    message.inputs.add(name="input_ids", datatype="INT32", shape=[1])
    message.raw_input_contents.append(bytes(4))
    for name, value in values.items():
        message.parameters[name].int64_param = value
    body = json.dumps({"id": "supervisor", "input_ids": [0], **values}).encode()

    def ask_by_grpc() -> bool:
        with grpc.insecure_channel(grpc_address, options=DIRECT) as channel:
            infer = channel.stream_stream(STREAM_INFER)
            try:
                # read to the end: 24.10 may crash if a stream is cancelled just then
                return bool(list(infer(iter([message.SerializeToString()]))))
            except grpc.RpcError as error:
                return bool(error.code() is not grpc.StatusCode.UNAVAILABLE)

    def ask_by_http() -> bool:
        request = urllib.request.Request(
            f"{http_url}/v2/models/minisgl/generate",
            body,
            {"Content-Type": "application/json"},
        )
        try:
            open_local(request, timeout_s=_ASK_AT_LEAST_EVERY_S).close()
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            return False
        return True

    asking: Mapping[str, Callable[[], bool]] = dict(
        zip(_WAYS, (ask_by_grpc, ask_by_http), strict=True)
    )
    threads = [
        threading.Thread(target=_until_answered, args=item, daemon=True) for item in asking.items()
    ]
    print(_ASKED, flush=True)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _until_answered(way: str, ask: Callable[[], Any]) -> None:
    while not ask():  # the supervisor ends this process in the end
        time.sleep(_LOOK_EVERY_S)
    print(way, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
