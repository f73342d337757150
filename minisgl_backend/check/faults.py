"""Faults, provoked in a server of our own while requests are open.

Knows processes and signals. Each caller must learn of a fault, the health port must say so, and
afterwards new requests must be served and nothing of the dead be left.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Final

from minisgl_client.client import Client
from minisgl_client.errors import MinisglError

from minisgl_backend.check.canary import Canary
from minisgl_backend.check.case import Case
from minisgl_backend.check.own_server import PATIENCE_S, OwnServer
from minisgl_backend.check.target import wait_until

NOTICED_WITHIN_S: Final = 2.0
RECOVERED_WITHIN_S: Final = 15.0
PAUSE_S: Final = 3.0
"""No hang: nothing may happen but that answers come later."""
_NUM_STREAMS: Final = 16
_LONG: Final = 300
_STARTED_S: Final = 30.0


class Faults:
    """Faults of one server; ``is_timed``: promises about times are judged, not only shown."""

    def __init__(
        self, own: OwnServer, canary: Canary, *, is_timed: bool, patience_s: float = PATIENCE_S
    ) -> None:
        self._own = own
        self._canary = canary
        self._is_timed = is_timed
        self._patience_s = patience_s

    def jobs(self) -> dict[str, Callable[[], list[Case]]]:
        """All faults by name. Fewer than the supervisor would take for hopeless."""
        return {
            "pause": lambda: [self.paused()],
            "engine": lambda: [self.killed("llm_engine")],
            "tokenizer": lambda: [self.killed("tokenizer")],
            "detokenizer": lambda: [self.killed("detokenizer")],
            "tritonserver": lambda: [self.server_killed()],
        }

    def killed(self, model: str) -> Case:
        """SIGKILL of a model's process."""
        return self._dead(f"kill -9 of {model}", model, lambda: self._own.send(model, SIGKILL))

    def server_killed(self) -> Case:
        """SIGKILL of tritonserver itself."""
        return self._dead("kill -9 of tritonserver", None, self._kill_server)

    def paused(self) -> Case:
        """The engine's process stands still for a while."""
        case = Case(f"the engine pauses for {PAUSE_S:g} s", 1)
        num_before = self._own.stats().told["num_recoveries"]
        with Client(self._own.grpc_address, retries=0) as client:
            stream = client.stream(input_ids=[1, 2, 3], max_tokens=_LONG, ignore_eos=True)
            next(stream)
            pid = self._own.send("llm_engine", SIGSTOP)
            try:
                alarmed = wait_until(lambda: not self._own.is_ready(), PAUSE_S)
            finally:
                os.kill(pid, SIGCONT)
            case.expect(not alarmed, "a pause was taken for a hang")
            try:
                for _ in stream:
                    pass
                num_tokens = stream.result.num_output_tokens
                case.ended["answered"] += 1
                case.expect(num_tokens == _LONG, f"the stream ended after {num_tokens} tokens")
            except MinisglError as error:
                case.expect(False, f"the stream ended with {error.code}")
        num_recoveries = self._own.stats().told["num_recoveries"] - num_before
        case.expect(num_recoveries == 0, f"{num_recoveries} recoveries")
        case.what = "the stream went on"
        return case

    # --- helpers -----------------------------------------------------------------------------

    def _kill_server(self) -> int:
        pid = self._own.server.pid
        os.kill(pid, SIGKILL)
        return pid

    def _dead(self, name: str, model: str | None, kill: Callable[[], int]) -> Case:
        case = Case(name, _NUM_STREAMS)
        before = self._own.server
        with (
            Client(self._own.grpc_address, retries=0) as client,
            ThreadPoolExecutor(_NUM_STREAMS) as pool,
        ):
            endings = [pool.submit(_ending, client) for _ in range(_NUM_STREAMS)]
            open_now = wait_until(lambda: self._num_open() == _NUM_STREAMS, _STARTED_S)
            case.expect(open_now, "the streams did not begin")
            killed_s = time.perf_counter()
            pid = kill()
            noticed = wait_until(lambda: not self._own.is_ready(), self._patience_s)
            noticed_s = time.perf_counter() - killed_s
            case.expect(noticed, "the health port never said so")
            back = noticed and wait_until(self._own.is_ready, self._patience_s)
            recovered_s = time.perf_counter() - killed_s
            case.expect(back or not noticed, "the health port never said that it is back")
            done, hung = wait_for_all(endings, self._patience_s)
            case.expect(not hung, f"{len(hung)} callers wait for ever")
            if hung:
                client.close()  # else this would wait for them
        errors = [code for code, _ in (one.result() for one in done) if code]
        ended_s = max((at_s for _, at_s in (one.result() for one in done)), default=0.0) - killed_s
        if model in (None, "llm_engine"):
            num_whole = len(done) - len(errors)
            case.expect(num_whole == 0, f"{num_whole} streams ended as if all was well")
        case.ended.update(failed=len(errors), answered=len(done) - len(errors))
        serves = wait_until(self._serves, self._patience_s)
        case.expect(serves, "new requests are not served")
        case.expect(not _runs(pid), "the process is still there")
        if before is not self._own.server:
            case.expect(not before.directory.exists(), "the old server's files are still there")
            case.expect(not before.shared_memory_regions(), "its shared memory is still there")
        num_wrong = len(self._canary.mismatches)
        if serves:
            self._canary.compare_all()
        case.expect(len(self._canary.mismatches) == num_wrong, "the canary's answers changed")
        case.what = (
            f"{len(errors)} of {len(endings)} streams failed, the last ended after {ended_s:.1f} s;"
            f" ready again after {recovered_s:.1f} s"
        )
        case.figures = {
            f"{name}: not ready after, s": noticed_s,
            f"{name}: ready again after, s": recovered_s,
        }
        if self._is_timed:
            case.expect(noticed_s <= NOTICED_WITHIN_S, f"noticed after {noticed_s:.1f} s")
            case.expect(recovered_s <= RECOVERED_WITHIN_S, f"ready again after {recovered_s:.1f} s")
        return case

    def _num_open(self) -> int:
        return int(self._own.stats().engine.get("num_open", -1))

    def _serves(self) -> bool:
        if not self._own.is_ready():
            return False
        with Client(self._own.grpc_address, retries=0, timeout_s=10) as client:
            try:
                return bool(client.generate(input_ids=[1], max_tokens=1).num_output_tokens)
            except MinisglError:
                return False


def _ending(client: Client) -> tuple[str, float]:
    """How and when a long answer ends: an error's code or nothing, by ``time.perf_counter``."""
    code = ""
    try:
        with client.stream(input_ids=[1, 2, 3], max_tokens=_LONG, ignore_eos=True) as stream:
            for _ in stream:
                pass
    except MinisglError as error:
        code = error.code
    return code, time.perf_counter()


def _runs(pid: int) -> bool:
    """Whether a process is there and no zombie: 24.10 asks after a child only at its own end."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
