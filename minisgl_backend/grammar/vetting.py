"""Tries out grammars in separate processes before the engine compiles them.

llguidance bounds most of its work, but not all: ten thousand rules that refer to each other
overflow its stack, and a schema of a few kilobytes can take it seconds. Here such a grammar crashes
or stalls a process that does nothing else, and only its request fails. A grammar that passes is
compiled again by the engine, which then does the same work and no more.

A keeper, ``python -m minisgl_backend.grammar.vetting SOCKET ...``, reads the tokenizer as a line of
JSON, then forks a worker for each socket, and a new one for each that dies. So the memory of a
grammar is freed with its worker, and the next grammar waits only for a fork. A worker gets a
grammar and a ``Budget`` in a line of JSON, and answers with a line. If a grammar exceeds its
budget, an alarm ends the worker, and the keeper answers instead. Keeper and workers end with the
engine, since its end closes the sockets.

Each budget has its own workers: grammars with the large budget never delay those with the small
one, and their workers run with a lower priority. Must not know which request a grammar belongs to.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any, Final

from llguidance import LLTokenizer

from minisgl_backend.death_signal import end_with
from minisgl_backend.errors import EngineFailure, InvalidRequest, Overloaded, Unsupported
from minisgl_backend.grammar.complaints import TOO_DEEP, complaint, one_line
from minisgl_backend.grammar.guidance import TokenizerFacts, new_matcher
from minisgl_backend.grammar.sources import to_llguidance
from minisgl_backend.grammar.special_tokens import SpecialTokens
from minisgl_backend.request import Grammar, GrammarKind

_PATIENCE_S: Final = 60.0
"""After this long without an answer, the keeper is considered dead. It may first have to read the
tokenizer."""
_MOST_BYTES: Final = 2**30
"""Memory that a worker may map in addition to the keeper's."""
_STACK_BYTES: Final = 2**20
"""A worker's stack; the engine's threads have at least 2 MiB for the same work."""
NUM_WORKERS: Final = min(8, os.cpu_count() or 1)
"""Number of grammars with the same budget that are tried out at once."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits on trying out a grammar: CPU time, and wall-clock time for a machine that has other
    work. ``niceness`` is that of the process that does it; the engine's is 0."""

    seconds: float
    wall_seconds: float
    niceness: int


QUICK: Final = Budget(seconds=0.02, wall_seconds=0.5, niceness=0)
"""Enough for everyday schemas, most of which take 1 to 10 ms."""
LONG: Final = Budget(seconds=0.25, wall_seconds=5.0, niceness=10)
"""The most that a grammar may take."""


class TakesLonger(InvalidRequest):
    """A grammar has used up its budget."""


class Vetting:
    """Tries grammars out, for callers on any threads; a caller waits for its answer."""

    def __init__(self, facts: TokenizerFacts) -> None:
        """Start the processes. Raises ``EngineFailure`` if they cannot be started."""
        self.is_lost = False
        # None after the end
        self._free: dict[Budget, SimpleQueue[socket.socket | None]] = {}
        self._channels: list[socket.socket] = []
        pairs = [socket.socketpair() for _ in range(2 * NUM_WORKERS)]
        for budget, (ours, _) in zip((QUICK, LONG) * NUM_WORKERS, pairs, strict=True):
            ours.settimeout(_PATIENCE_S)
            self._free.setdefault(budget, SimpleQueue()).put(ours)
            self._channels.append(ours)
        theirs = [other.fileno() for _, other in pairs]
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "minisgl_backend.grammar.vetting", *map(str, theirs)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # Rust prints its panics there
            pass_fds=theirs,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # threads would not survive a fork
            text=True,
        )
        for _, other in pairs:
            other.close()
        assert self._keeper.stdin is not None
        try:
            with self._keeper.stdin as pipe:
                pipe.write(json.dumps(asdict(facts)) + "\n")
        except BrokenPipeError:
            self.close()
            raise EngineFailure("the process that compiles grammars did not start") from None

    def __call__(self, grammar: Grammar, budget: Budget) -> str:
        """The grammar in llguidance's form; raises ``TakesLonger``, ``InvalidRequest`` and
        ``Unsupported``, and ``EngineFailure`` if the processes have ended: then ``is_lost``."""
        workers = self._free[budget]
        channel = workers.get()
        if channel is None:
            workers.put(None)
            raise Overloaded("the server is shutting down")
        message = {
            "kind": grammar.kind.value,
            "source": grammar.source,
            "channels": grammar.channels,
            "budget": asdict(budget),
        }
        try:
            answer = _asked(channel, message)
        except (OSError, ValueError):
            self.is_lost = True
            raise EngineFailure("the processes that compile grammars have ended") from None
        finally:
            workers.put(channel)
        what = grammar.kind.value
        if answer.get("died") in (signal.SIGPROF, signal.SIGALRM):
            raise TakesLonger(f"{what}: compiling it takes longer than {budget.seconds:g} s")
        if "died" in answer:
            raise InvalidRequest(f"{what}: it is too large or too deep to be compiled")
        if "unsupported" in answer:
            raise Unsupported(f"{what}: {answer['unsupported']}")
        if "error" in answer:
            raise InvalidRequest(f"{what}: {answer['error']}")
        return str(answer["grammar"])

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._keeper.kill()
        self._keeper.wait()
        for channel in self._channels:
            channel.shutdown(socket.SHUT_RDWR)  # the caller that uses it, if any, gives it back
        if self._channels:
            for workers in self._free.values():
                for _ in range(NUM_WORKERS):
                    if (free := workers.get()) is not None:
                        free.close()
                workers.put(None)
        self._channels.clear()


def _asked(channel: socket.socket, message: Mapping[str, Any]) -> dict[str, Any]:
    """Send a line, and wait for the line that answers it. Raises ``OSError`` and ``ValueError``."""
    channel.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while channel.recv(2**16):  # left over from a worker that died while it was idle
            pass
    channel.settimeout(_PATIENCE_S)
    channel.sendall(json.dumps(message).encode() + b"\n")
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        part = channel.recv(2**16)
        if not part:
            raise ConnectionError
        parts.append(part)
    answer: dict[str, Any] = json.loads(b"".join(parts))
    return answer


# --- in the keeper's process, and in the workers' ------------------------------------------------


def _keep(channels: Sequence[socket.socket]) -> None:
    """Have a worker for each channel until the other ends of all are closed."""
    facts = TokenizerFacts(**json.loads(sys.stdin.readline()))
    tokenizer = facts.build()
    special_tokens = SpecialTokens(facts.special_tokens)
    workers = {_forked(channel, tokenizer, special_tokens): channel for channel in channels}
    while workers:
        process, status = os.wait()
        channel = workers.pop(process)
        if status == 0:  # the other end is closed
            continue
        answer = {"died": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0}
        with contextlib.suppress(OSError):
            channel.sendall(json.dumps(answer).encode() + b"\n")
        workers[_forked(channel, tokenizer, special_tokens)] = channel


def _forked(channel: socket.socket, tokenizer: LLTokenizer, special_tokens: SpecialTokens) -> int:
    """The process id of a new worker."""
    keeper = os.getpid()
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        end_with(keeper)
        _limit_memory()
        threading.stack_size(_STACK_BYTES)
        ended: list[bool] = []
        thread = threading.Thread(target=_work, args=(channel, tokenizer, special_tokens, ended))
        thread.start()
        thread.join()
        status = 0 if ended else 1
    finally:
        os._exit(status)


def _work(
    channel: socket.socket,
    tokenizer: LLTokenizer,
    special_tokens: SpecialTokens,
    ended: list[bool],
) -> None:
    """Try out the grammars that come; tell ``ended`` that no more will."""
    for line in channel.makefile("r", encoding="ascii"):
        fields = json.loads(line)
        budget = Budget(**fields["budget"])
        os.setpriority(os.PRIO_PROCESS, 0, budget.niceness)  # of this thread
        signal.setitimer(signal.ITIMER_PROF, budget.seconds)  # its default action ends the process
        signal.setitimer(signal.ITIMER_REAL, budget.wall_seconds)
        kind, channels = GrammarKind(fields["kind"]), fields["channels"]
        asked = Grammar(kind, fields["source"], channels=channels)
        answer = _tried(asked, tokenizer, special_tokens)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        channel.sendall(json.dumps(answer).encode() + b"\n")
    ended.append(True)


def _tried(asked: Grammar, tokenizer: LLTokenizer, special_tokens: SpecialTokens) -> dict[str, str]:
    try:
        grammar = to_llguidance(asked, special_tokens)
    except Unsupported as error:
        return {"unsupported": str(error)}
    except RecursionError:
        return {"error": TOO_DEEP}
    except (InvalidRequest, ValueError) as error:  # such as half of a surrogate pair
        return {"error": one_line(str(error))}
    try:
        new_matcher(tokenizer, grammar)
    except InvalidRequest as error:
        return {"error": complaint(str(error), asked)}
    return {"grammar": grammar}


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    most = mapped + _MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, which ends this
    _keep([socket.socket(fileno=int(number)) for number in sys.argv[1:]])
