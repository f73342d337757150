"""Asks a server for one token, end to end, as clients do, when it seems to answer nobody.

Triton may say that it is ready while no response leaves it, and its models' processes, which are
well, do not know. What they show is that requests are inside and none of them ends. That may be in
order, as of long answers and long prompts, so then a process of its own asks for a token, over gRPC
and over HTTP: only it needs gRPC's library, and it can be killed whatever it waits for. Any answer
will do, also an error. There is one at the latest when the request's deadline is over and the
models have come to it, and only time in which they do not keep it waiting is held against Triton.

Costs: one such process at a time, each for a second or two of computing, and ever fewer while other
requests do not end and the answers come.
"""

from __future__ import annotations

import json
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
from minisgl_backend.runtime_files import DETOKENIZER, OPTIONS_MODEL
from minisgl_backend.server.model_processes import ModelProcess, computed_s, counts_of
from minisgl_backend.server.process import TritonServer

ASK_AFTER_S: Final = 15.0
"""A token is asked for when requests are inside, and none has ended for so long."""
_ASK_AT_LEAST_EVERY_S: Final = 120.0
TIMEOUT_S: Final = 5.0
"""The deadline of the request: the engine answers it then, after a few steps, whatever it does."""
OVERDUE_S: Final = 20.0
"""An answer that has been due for so long does not come, as ``faults.TRITON_HANG_AFTER_S``."""
_FEW_STEPS: Final = 3
"""Steps of an engine in which it meets every deadline: one may run, and one be launched ahead."""
_LOOK_EVERY_S: Final = 1.0
_AT_WORK: Final = 0.02
"""The share of a core with which a process of a busy machine still computes, and no idle one."""
_ASKED: Final = "asked"
_WAYS: Final = ("gRPC", "HTTP")


class Asker:
    """Asks one server. Belongs to one thread, and never blocks it for long."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        self._looked_s = time.monotonic()
        self._num_ended = -1
        self._quiet_s = 0.0
        self._pause_s = ASK_AFTER_S
        self._question: _Question | None = None

    def look(self, processes: Sequence[ModelProcess]) -> str | None:
        """Ask if it is time to; what is wrong, if an answer is overdue. Call it often."""
        now_s = time.monotonic()
        # a pause of this process is no silence of others
        passed_s = min(now_s - self._looked_s, _LOOK_EVERY_S)
        self._looked_s = now_s
        if self._question is None:
            if self._is_due(processes, passed_s):
                self._question = _Question(self._server)
            return None
        missing = self._question.missing()
        has_failed = self._question.has_failed
        is_overdue = self._question.is_overdue(processes, passed_s)
        if missing and not (has_failed or is_overdue):
            return None
        self.close()
        self._num_ended = -1
        if missing and not has_failed:
            ways = " and ".join(missing)
            return f"tritonserver answers no request over {ways}, whatever it says of itself"
        self._quiet_s = 0.0
        self._pause_s = min(2 * self._pause_s, _ASK_AT_LEAST_EVERY_S)
        return None

    def close(self) -> None:
        """Ask no more."""
        if self._question is not None:
            self._question.close()
            self._question = None

    def _is_due(self, processes: Sequence[ModelProcess], passed_s: float) -> bool:
        beats = [process.beat for process in processes]
        # not packets, which may go on while nothing reaches a client
        num_ended = sum(
            process.beat.num_seen - process.beat.num_inside
            for process in processes
            if process.model != DETOKENIZER
        )
        if self._num_ended < 0:  # the change is that of the token just asked for
            self._num_ended = num_ended
        if num_ended != self._num_ended or not any(beat.num_inside for beat in beats):
            self._num_ended = num_ended
            self._quiet_s, self._pause_s = 0.0, ASK_AFTER_S
        self._quiet_s += passed_s
        return self._quiet_s >= self._pause_s


class _Question:
    """One token asked for, by a process of its own."""

    def __init__(self, server: TritonServer) -> None:
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
        self._heard = b""
        self._asked_for_s = 0.0
        self._overdue_s = 0.0
        self._unseen_s = 0.0
        self._num_steps: dict[int, int] | None = None
        """Those of each engine when the deadline had passed, by process."""
        self._computed_s: dict[int, float] = {}

    def missing(self) -> list[str]:
        """The ways in which no answer came."""
        assert self._process.stdout is not None
        self._heard += self._process.stdout.read() or b""
        words = self._heard.decode("ascii").split()
        return [way for way in _WAYS if way not in words]

    @property
    def has_failed(self) -> bool:
        """Whether the process could not even ask."""
        return self._process.poll() is not None and not self._has_asked

    @property
    def _has_asked(self) -> bool:
        return _ASKED in self._heard.decode("ascii").split()

    def is_overdue(self, processes: Sequence[ModelProcess], passed_s: float) -> bool:
        """Whether an answer would be here if the server answered; ``passed_s`` is since before."""
        if not self._has_asked:
            return False
        self._asked_for_s += passed_s
        self._unseen_s += passed_s
        if self._asked_for_s > TIMEOUT_S and self._unseen_s >= _LOOK_EVERY_S:
            if not self._wait_for_models(processes, self._unseen_s):
                self._overdue_s += self._unseen_s
            self._unseen_s = 0.0
        return self._overdue_s > OVERDUE_S

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _wait_for_models(self, processes: Sequence[ModelProcess], seconds: float) -> bool:
        """Whether it may be a model that keeps the answer waiting, as in the last ``seconds``."""
        try:
            counts = {
                process.pid: counts_of(self._directory, process)
                for process in processes
                if process.model == OPTIONS_MODEL
            }
            num_steps = {pid: int(of_one["num_steps"]) for pid, of_one in counts.items()}
            num_open = {pid: int(of_one["num_open"]) for pid, of_one in counts.items()}
        except (OSError, ValueError, LookupError):
            return True  # that is another fault, and noticed elsewhere
        if self._num_steps is None or self._num_steps.keys() != num_steps.keys():
            self._num_steps = num_steps
        is_computing = any(
            num_open[pid] and num_steps[pid] < self._num_steps[pid] + _FEW_STEPS for pid in counts
        )
        before, self._computed_s = (
            self._computed_s,
            {
                process.pid: computed_s(process.pid)
                for process in processes
                if process.model != OPTIONS_MODEL and process.beat.num_inside
            },
        )
        is_tokenizing = any(
            now_s - before.get(pid, 0.0) > _AT_WORK * seconds
            for pid, now_s in self._computed_s.items()
        )
        return is_computing or is_tokenizing


# --- the process that asks ------------------------------------------------------------------------


def main(grpc_address: str, http_url: str) -> None:
    """Ask, and print what answered as soon as it has."""
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
                # to the end: 24.10 may crash if a stream is cancelled just then
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
