"""Compiles the grammars of requests outside the engine's loop, and keeps them for later requests.

Knows which grammars wait and who waits for them. Must not know answers (``matchers``).

Ordinary grammars do not wait for slow ones. Each grammar is first tried with a small budget
(``vetting.QUICK``). If that is not enough, it starts again in the long queue, which has its own
threads and processes. Each queue is first come, first served, and a bounded number of grammars may
wait; when there is no room, a request is ``Overloaded``. So on two idle cores an everyday schema
waits for a second behind 60 slow ones, and for 4 s behind the largest number that may wait.

Copies of a matcher share the states that its lexer has reached, which makes masks cheap if many
answers follow the same grammar. But only one of the copies can be used at a time: if all rows of a
step shared a lexer, their masks would be made one after another. So a grammar that compiles quickly
is compiled again for every ``_MOST_COPIES`` answers. The number of states is limited, and states
are never freed. So once an answer has reached the limits of a grammar, that grammar is not kept
(``Compiler.drop``), and the next request starts without states.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Final, TypeAlias

from llguidance import LLMatcher, LLTokenizer

from minisgl_backend.errors import (
    EngineFailure,
    MiniSGLError,
    Overloaded,
    Unsupported,
    shutting_down,
)
from minisgl_backend.grammar.complaints import one_line
from minisgl_backend.grammar.guidance import TokenizerFacts, new_matcher
from minisgl_backend.grammar.vetting import (
    LONG,
    NUM_WORKERS,
    QUICK,
    Budget,
    TakesLonger,
    Vetting,
)
from minisgl_backend.request import Grammar, GrammarKind, TokenId

logger = logging.getLogger(__name__)

_MOST_KEPT: Final = 256
"""The most compiled grammars kept for copying, those used most recently: as many as may run at once
by default. The lexer states of a grammar take at most 10 MB, usually 0.1 MB."""
_MOST_COPIES: Final = 16
"""The most answers that share a lexer."""
_QUICK_S: Final = 0.01
"""A grammar that takes longer to compile is compiled only once, for any number of answers."""
_MOST_KEPT_BYTES: Final = 2 * 2**20
"""The most bytes of kept grammars' sources. Compiled, a large one takes up to 100 times as much."""
MOST_WAITING: Final = 128 * NUM_WORKERS
"""The most grammars that may wait in the quick queue."""
MOST_LONG: Final = 8 * NUM_WORKERS
"""The most grammars that may wait in the long queue; the last one waits for 2 s."""

_Key: TypeAlias = tuple[GrammarKind, str, bool]


def _key(grammar: Grammar) -> _Key:
    """Grammars with the same key are compiled once."""
    return grammar.kind, grammar.source, grammar.channels


def _size(key: _Key) -> int:
    """Number of bytes of a grammar's source."""
    return len(key[1].encode())


class _Job:
    """A grammar that is not compiled yet, and the requests that have asked for it."""

    __slots__ = ("asked", "grammar")

    def __init__(self, grammar: Grammar, asked: Future[LLMatcher]) -> None:
        self.grammar = grammar
        self.asked = [asked]


class _Source:
    """A compiled grammar, which any thread may copy."""

    def __init__(self, tokenizer: LLTokenizer, vetted: str) -> None:
        """``vetted`` is the grammar in llguidance's form, as ``vetting`` has returned it."""
        self._tokenizer = tokenizer
        self._vetted = vetted
        self._lock = threading.Lock()
        self._compile()

    def _compile(self) -> None:
        began_s = time.thread_time()
        self._matcher = new_matcher(self._tokenizer, self._vetted)
        self._is_quick = time.thread_time() - began_s < _QUICK_S
        self._num_copies = 0

    def copy(self) -> LLMatcher:
        """A matcher at the beginning of the grammar."""
        with self._lock:
            if self._num_copies == _MOST_COPIES and self._is_quick:
                self._compile()
            self._num_copies += 1
            return self._matcher.deep_copy()


class _Queue:
    """Threads that try out grammars with one budget."""

    def __init__(self, name: str, budget: Budget, most_waiting: int) -> None:
        self.budget = budget
        self.threads = ThreadPoolExecutor(NUM_WORKERS, name)
        self._room = threading.Semaphore(most_waiting)

    def enter(self, work: Callable[[_Job, _Queue], None], job: _Job) -> bool:
        """Do the work on a thread; False if too many wait already. Raises ``RuntimeError`` after
        the threads have ended."""
        if not self._room.acquire(blocking=False):
            return False
        self.threads.submit(self._begin, work, job)
        return True

    def _begin(self, work: Callable[[_Job, _Queue], None], job: _Job) -> None:
        self._room.release()
        work(job, self)


class Compiler:
    """Makes matchers at the beginning of their grammars. May be called on any threads."""

    def __init__(
        self,
        load: Callable[[], tuple[str, Mapping[str, TokenId]]],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[TokenId],
    ) -> None:
        """``load`` returns a tokenizer's definition and its special tokens (``TokenizerFacts``).

        It is called by ``prepare``, or for the first grammar, which then waits: some seconds if
        there are 150,000 tokens.
        """
        self._load = load
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._tools: Future[tuple[LLTokenizer, Vetting]] | None = None
        self._prepared: Future[tuple[LLTokenizer, Vetting]] | None = None
        self._is_closed = False
        self._quick = _Queue("grammar", QUICK, MOST_WAITING)
        self._long = _Queue("long grammar", LONG, MOST_LONG)
        self._copier = ThreadPoolExecutor(1, "copies")
        self._lock = threading.Lock()
        self._jobs: dict[_Key, _Job] = {}
        self._kept: OrderedDict[_Key, _Source] = OrderedDict()
        self._kept_bytes = 0

    def prepare(self) -> None:
        """Read the tokenizer and start the processes now, on another thread."""
        self._prepared = self._quick.threads.submit(self._opened)

    def wait_until_prepared(self) -> None:
        """Wait until what ``prepare`` has begun is done, if it was called. If it fails, grammars
        will report it."""
        if self._prepared is not None:
            wait([self._prepared])

    def ask(self, grammar: Grammar) -> Future[LLMatcher]:
        """A matcher at the beginning of the grammar, or a ``MiniSGLError`` that says what is wrong.

        Requests that ask for the same grammar have it compiled once. A kept grammar does not wait
        for others. If all futures for a grammar are cancelled before it is begun, it is not
        compiled.
        """
        key = _key(grammar)
        asked: Future[LLMatcher] = Future()
        try:
            with self._lock:
                kept, job = self._kept.get(key), self._jobs.get(key)
                if kept is not None:
                    self._kept.move_to_end(key)
                    self._copier.submit(_copy, kept, asked)
                elif job is not None:
                    job.asked.append(asked)
                elif self._quick.enter(self._compile, job := _Job(grammar, asked)):
                    self._jobs[key] = job
                else:
                    asked.set_exception(Overloaded("too many grammars wait to be compiled"))
        except RuntimeError:  # the threads have ended
            asked.set_exception(shutting_down())
        return asked

    def drop(self, grammar: Grammar) -> None:
        """Stop keeping the grammar: one of its matchers has reached the limits that all share."""
        with self._lock:
            if self._kept.pop(key := _key(grammar), None) is not None:
                self._kept_bytes -= _size(key)

    def close(self) -> None:
        """End threads and processes; waiting futures are cancelled. Idempotent."""
        pools = (self._quick.threads, self._long.threads, self._copier)
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True
            tools, self._tools = self._tools, None
        if tools is not None:
            with suppress(InvalidStateError):  # else they are being made: their thread will notice
                tools.set_exception(shutting_down())
            if tools.exception() is None:
                tools.result()[1].close()
        for pool in pools:
            pool.shutdown()
        for job in self._jobs.values():
            for asked in job.asked:
                asked.cancel()

    def _compile(self, job: _Job, queue: _Queue) -> None:
        key = _key(job.grammar)
        with self._lock:
            if all(asked.cancelled() for asked in job.asked):
                del self._jobs[key]
                return
        made: _Source | MiniSGLError
        try:
            made = self._made(job.grammar, queue.budget)
        except TakesLonger as error:
            made = error
            if queue is self._quick:
                with suppress(RuntimeError):  # the threads have ended
                    if self._long.enter(self._compile, job):
                        return
                made = Overloaded("too many grammars that take long wait to be compiled")
        except MiniSGLError as error:
            made = error
        except Exception as error:
            made = _failure(error)
        with self._lock:
            del self._jobs[key]
            if isinstance(made, _Source):
                self._keep(key, made)
        for asked in job.asked:
            if not isinstance(made, MiniSGLError):
                _copy(made, asked)
            elif asked.set_running_or_notify_cancel():
                asked.set_exception(made)

    def _keep(self, key: _Key, made: _Source) -> None:
        """Keep a grammar, and drop the oldest ones beyond the limits; with the lock held."""
        self._kept[key] = made
        self._kept_bytes += _size(key)
        while len(self._kept) > _MOST_KEPT or self._kept_bytes > _MOST_KEPT_BYTES:
            gone, _ = self._kept.popitem(last=False)
            self._kept_bytes -= _size(gone)

    def _made(self, grammar: Grammar, budget: Budget) -> _Source:
        """The compiled grammar. If the processes have ended, new ones try the grammar again."""
        tokenizer, vet = self._opened()
        try:
            vetted = vet(grammar, budget)
        except EngineFailure:
            if not vet.is_lost:
                raise
            tokenizer, vet = self._opened()
            vetted = vet(grammar, budget)
        return _Source(tokenizer, vetted)

    def _opened(self) -> tuple[LLTokenizer, Vetting]:
        """The tokenizer and the processes, which are created when they are first needed."""
        with self._lock:
            if self._is_closed:
                raise shutting_down()
            tools = self._tools
            if tools is None or (tools.done() and _is_lost(tools)):
                tools = self._tools = Future()
                # a daemon thread, so that the engine does not wait for it when it ends
                threading.Thread(target=self._open, args=(tools,), daemon=True).start()
        return tools.result()

    def _open(self, tools: Future[tuple[LLTokenizer, Vetting]]) -> None:
        try:
            definition, special = self._load()
            facts = TokenizerFacts(definition, self._vocab_size, self._eos_token_ids, special)
            vetting = Vetting(facts)  # reads the tokenizer in the meantime
            try:
                tools.set_result((_built(facts), vetting))
            except BaseException:
                vetting.close()
                raise
        except InvalidStateError:  # closed in the meantime
            pass
        except Unsupported as error:
            logger.warning("%s", error)
            with suppress(InvalidStateError):
                tools.set_exception(error)
        except BaseException as error:
            logger.exception("the tokenizer could not be read for grammars")
            with suppress(InvalidStateError):
                tools.set_exception(error)


def _copy(made: _Source, asked: Future[LLMatcher]) -> None:
    if not asked.set_running_or_notify_cancel():
        return
    try:
        copy = made.copy()
    except MiniSGLError as error:
        asked.set_exception(error)
    except Exception as error:
        asked.set_exception(_failure(error))
    else:
        asked.set_result(copy)


def _failure(error: Exception) -> EngineFailure:
    """Log the exception that is being handled. The client learns only its type."""
    logger.exception("a grammar could not be compiled")
    return EngineFailure(f"the grammar could not be compiled: {type(error).__name__}")


def _built(facts: TokenizerFacts) -> LLTokenizer:
    """llguidance's tokenizer. Raises ``Unsupported`` if it is of a kind that llguidance does not
    know."""
    try:
        return facts.build()
    except ValueError as error:
        told = one_line(str(error))
        raise Unsupported(f"this tokenizer takes no structured outputs: {told}") from error


def _is_lost(tools: Future[tuple[LLTokenizer, Vetting]]) -> bool:
    """Whether they have ended, or could not be created and might be now. If so, they are closed."""
    if (error := tools.exception()) is not None:
        return not isinstance(error, Unsupported)
    vetting = tools.result()[1]
    if vetting.is_lost:
        vetting.close()
    return vetting.is_lost
