"""The thread between the callers of ``LLM`` and the engine: lets prompts in, and sees them out.

Knows the engine's door, threads, and how much room the engine has. Must not know text or outputs.

An engine refuses requests when its queue is full, since a server's clients can retry. In process
the caller waits instead: a prompt enters when the engine has room for it. Calls take turns.

Ctrl-C may end a function of Python at any call that it makes or returns from, ``with condition:``
and ``future.result()`` among them, which then keep their lock for good. So a caller's thread shares
nothing with others but queues written in C, whose ``put`` and ``get`` happen or do not: whatever
changes the engine is an order in a queue, and is done on this thread, which no signal interrupts.

Invariants: the counts belong to this thread. Both are at least the engine's own, which it lowers
before its events arrive. An order that is given before the end is carried out.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Protocol, TypeVar

from minisgl_backend.errors import Cancelled, EngineFailure, MiniSGLError, Overloaded
from minisgl_backend.request import Event, Failed, Request, RequestId
from minisgl_backend.runtime.door import Door

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Guest(Protocol):
    """One prompt, as far as the porter knows it. Its events tell when it is ``admitted`` and when
    its samples have ``left``."""

    samples: Sequence[Request]

    def put(self, sample: int, event: Event) -> None:
        """Take an event of a sample, on the engine's thread or on the porter's."""


class Visit:
    """The guests of one call that have not entered, in their order."""

    def __init__(self, guests: Iterator[Guest], on_refused: Callable[[Exception], None]) -> None:
        """``on_refused`` gets the reason if not all can enter, such as the porter's end."""
        self._guests = guests
        self.next = next(guests, None)
        self.refuse = on_refused

    def pop(self) -> Guest:
        """Take the ``next`` guest, which there is."""
        guest = self.next
        assert guest is not None
        self.next = next(self._guests, None)
        return guest


class Porter:
    """Gives orders to an engine, which it closes at its own end."""

    def __init__(self, engine: Door, *, num_tokenizers: int) -> None:
        self.is_closed = False
        self._engine = engine
        self._pool = ThreadPoolExecutor(num_tokenizers, thread_name_prefix="tokenizer")
        self._visits: deque[Visit] = deque()
        self._open: dict[Guest, Visit] = {}
        self._num_requests = 0
        self._num_waiting_tokens = 0
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._running = threading.Lock()  # held until the end: no Event, see above
        self._running.acquire()
        threading.Thread(target=self._run, name="porter", daemon=True).start()

    # --- callers -----------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise ``Cancelled`` once the porter is told to end."""
        if self.is_closed:
            raise _closed()

    def enter(self, visit: Visit) -> None:
        """Let the guests of a call in as there is room. Raises ``Cancelled``."""
        self._order(partial(self._enter, visit))

    def leave(self, visit: Visit) -> None:
        """End the requests of a call that are open, and let no more of it in."""
        self._orders.put(partial(self._leave, visit))

    def abort(self, request_id: RequestId) -> None:
        """End a request; ignored if it is not open."""
        self._orders.put(partial(self._engine.abort, request_id))

    def spread(self, jobs: Sequence[Callable[[], T]]) -> Iterator[T]:
        """The results of ``jobs`` in their order, several of which run at a time. Raises the error
        of the first that fails, and ``Cancelled``."""
        outcomes: SimpleQueue[tuple[int, T | Exception]] = SimpleQueue()
        is_over = False

        def run(index: int, job: Callable[[], T]) -> None:
            if is_over:
                return
            try:
                self.check_open()
                outcomes.put((index, job()))
            except Exception as error:
                outcomes.put((index, error))

        def start() -> None:
            for index, job in enumerate(jobs):
                try:
                    self._pool.submit(run, index, job)
                except RuntimeError as error:  # no thread can be started
                    outcomes.put((index, error))

        try:
            self._order(start)
            early: dict[int, T | Exception] = {}
            for index in range(len(jobs)):
                while index not in early:
                    early.update([outcomes.get()])
                outcome = early.pop(index)
                if isinstance(outcome, Exception):
                    raise outcome
                yield outcome
        finally:
            is_over = True

    def end(self) -> None:
        """Refuse all that is new, end all requests, and close the engine. Idempotent."""
        self.is_closed = True
        self._orders.put(None)

    def wait(self) -> None:
        """Wait until the engine is closed."""
        with self._running:
            pass

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.put(order)
        self.check_open()  # only now: the porter may have ended before it came to the order

    # --- the engine's thread -----------------------------------------------------------------

    def admitted(self, num_tokens: int) -> None:
        """A prompt of ``num_tokens`` has been given a row."""
        self._orders.put(partial(self._count, 0, -num_tokens))

    def left(self, guest: Guest, num_tokens: int, *, is_last: bool) -> None:
        """A sample has ended; ``num_tokens`` are those of its prompt if that still waited."""
        self._orders.put(partial(self._count, -1, -num_tokens, guest if is_last else None))

    # --- the porter's thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (order := self._orders.get()) is not None:
                try:
                    order()
                    self._let_in()
                except Exception:
                    logger.exception("an order to the engine failed")
            for visit in self._visits:
                visit.refuse(_closed())
            self._pool.shutdown()  # the jobs left find that all is over
            self._engine.close(drain_s=0)
        finally:
            self._running.release()

    def _enter(self, visit: Visit) -> None:
        if visit.next is not None:
            self._visits.append(visit)

    def _leave(self, visit: Visit) -> None:
        if visit in self._visits:
            self._visits.remove(visit)
        for guest in [guest for guest, its in self._open.items() if its is visit]:
            for request in guest.samples:
                self._engine.abort(request.id)

    def _count(self, num_requests: int, num_tokens: int, gone: Guest | None = None) -> None:
        self._num_requests += num_requests
        self._num_waiting_tokens += num_tokens
        if gone is not None:
            del self._open[gone]

    def _let_in(self) -> None:
        while self._visits and self._has_room(self._visits[0]):
            visit = self._visits.popleft()
            try:
                guest = visit.pop()
            except Exception as error:
                visit.refuse(error)
                continue
            self._enter(visit)
            self._open[guest] = visit
            samples = guest.samples
            self._count(len(samples), len(samples[0].prompt))
            sinks = [partial(guest.put, sample) for sample in range(len(samples))]
            try:
                self._engine.submit_samples(samples, sinks)
            except Exception as error:
                failure: MiniSGLError = EngineFailure(str(error))
                # Overloaded, although there is room: the engine has broken down
                if isinstance(error, MiniSGLError) and not isinstance(error, Overloaded):
                    failure = error
                for sink in sinks:
                    sink(Failed(failure))

    def _has_room(self, visit: Visit) -> bool:
        assert visit.next is not None  # or it would not wait
        samples, info = visit.next.samples, self._engine.info
        waiting = self._num_waiting_tokens
        return self._num_requests + len(samples) <= info.most_open and (
            not waiting or waiting + len(samples[0].prompt) <= info.max_queued_tokens
        )


def _closed() -> Cancelled:
    return Cancelled("this LLM is closed")
