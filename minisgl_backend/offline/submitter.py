"""The thread between the callers of ``LLM`` and the engine: submits prompts when there is room.

Knows the engine, threads, and how much room the engine has. Must not know text or outputs.

An engine refuses requests when its queue is full, since a server's clients can retry. In process
the caller waits instead: a prompt is submitted when the engine has room for it. Calls take turns.

Ctrl-C may interrupt a Python function at any call, even inside ``with condition:`` or
``future.result()``, whose locks then stay locked for good. So a caller's thread shares only queues
written in C with other threads; their ``put`` and ``get`` are atomic. Whatever changes the engine
is an order in a queue, and is carried out on this thread, which no signal interrupts.

Invariants: the counts belong to this thread. Both are at least the engine's own, which the engine
lowers before its events arrive. An order that is given before the end is carried out.
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
from minisgl_backend.runtime.engine_base import EngineBase

logger = logging.getLogger(__name__)

T = TypeVar("T")


class QueuedPrompt(Protocol):
    """A prompt to be submitted. It calls ``Submitter.admitted`` and ``ended`` on its events."""

    samples: Sequence[Request]

    def put(self, sample: int, event: Event) -> None:
        """Take an event of a sample, on the engine's thread or the submitter's."""


class CallQueue:
    """The prompts of one call that are not submitted yet, in order."""

    def __init__(
        self, prompts: Iterator[QueuedPrompt], on_failed: Callable[[Exception], None]
    ) -> None:
        """``on_failed`` gets the reason if not all can be submitted, such as ``Submitter.end``."""
        self._prompts = prompts
        self.next = next(prompts, None)
        self.fail = on_failed

    def pop(self) -> QueuedPrompt:
        """Remove and return the ``next`` prompt. There must be one."""
        prompt = self.next
        assert prompt is not None
        self.next = next(self._prompts, None)
        return prompt


class Submitter:
    """Submits the prompts of all calls to an engine, and closes the engine at its end."""

    def __init__(self, engine: EngineBase, *, num_tokenizers: int) -> None:
        self.is_closed = False
        self._engine = engine
        self._pool = ThreadPoolExecutor(num_tokenizers, thread_name_prefix="tokenizer")
        self._queues: deque[CallQueue] = deque()
        self._open: dict[QueuedPrompt, CallQueue] = {}
        self._num_requests = 0
        self._num_waiting_tokens = 0
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._running = threading.Lock()  # held until the end; not an Event: see above
        self._running.acquire()
        threading.Thread(target=self._run, name="submitter", daemon=True).start()

    # --- callers -----------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise ``Cancelled`` after ``end``."""
        if self.is_closed:
            raise _closed()

    def submit(self, queue: CallQueue) -> None:
        """Submit the prompts of a call as there is room. Raises ``Cancelled`` after ``end``."""
        self._order(partial(self._append, queue))

    def cancel(self, queue: CallQueue) -> None:
        """End the open requests of a call, and submit none of the rest."""
        self._orders.put(partial(self._cancel, queue))

    def abort(self, request_id: RequestId) -> None:
        """End a request; ignored if it is not open."""
        self._orders.put(partial(self._engine.abort, request_id))

    def run_all(self, jobs: Sequence[Callable[[], T]]) -> Iterator[T]:
        """Run ``jobs``, several at a time, and yield their results in order. Raises the error of
        the first that fails, and ``Cancelled`` after ``end``."""
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
        """Refuse new work, end all requests, and close the engine. Idempotent."""
        self.is_closed = True
        self._orders.put(None)

    def wait(self) -> None:
        """Wait until the engine is closed."""
        with self._running:
            pass

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.put(order)
        self.check_open()  # only now, since the submitter may have ended before it saw the order

    # --- the engine's thread -----------------------------------------------------------------

    def admitted(self, num_tokens: int) -> None:
        """A prompt of ``num_tokens`` has a row."""
        self._orders.put(partial(self._count, 0, -num_tokens))

    def ended(self, prompt: QueuedPrompt, num_tokens: int, *, is_last: bool) -> None:
        """A sample of the prompt has ended, and with ``is_last`` the prompt. ``num_tokens`` are
        those of the prompt if it still waited for a row, else 0."""
        self._orders.put(partial(self._count, -1, -num_tokens, prompt if is_last else None))

    # --- the submitter's thread --------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (order := self._orders.get()) is not None:
                try:
                    order()
                    self._submit_next()
                except Exception:
                    logger.exception("an order to the engine failed")
            for queue in self._queues:
                queue.fail(_closed())
            self._pool.shutdown()  # the remaining jobs see that the submitter is closed
            self._engine.close(drain_s=0)
        finally:
            self._running.release()

    def _append(self, queue: CallQueue) -> None:
        if queue.next is not None:
            self._queues.append(queue)

    def _cancel(self, queue: CallQueue) -> None:
        if queue in self._queues:
            self._queues.remove(queue)
        for prompt in [prompt for prompt, its in self._open.items() if its is queue]:
            for request in prompt.samples:
                self._engine.abort(request.id)

    def _count(self, num_requests: int, num_tokens: int, gone: QueuedPrompt | None = None) -> None:
        self._num_requests += num_requests
        self._num_waiting_tokens += num_tokens
        if gone is not None:
            del self._open[gone]

    def _submit_next(self) -> None:
        while self._queues and self._has_room(self._queues[0]):
            queue = self._queues.popleft()
            try:
                prompt = queue.pop()
            except Exception as error:
                queue.fail(error)
                continue
            self._append(queue)
            self._open[prompt] = queue
            samples = prompt.samples
            self._count(len(samples), len(samples[0].prompt))
            sinks = [partial(prompt.put, sample) for sample in range(len(samples))]
            try:
                self._engine.submit_samples(samples, sinks)
            except Exception as error:
                failure: MiniSGLError = EngineFailure(str(error))
                # Overloaded although there is room means that the engine has broken down
                if isinstance(error, MiniSGLError) and not isinstance(error, Overloaded):
                    failure = error
                for sink in sinks:
                    sink(Failed(failure))

    def _has_room(self, queue: CallQueue) -> bool:
        assert queue.next is not None  # else it would not be in ``_queues``
        samples = queue.next.samples
        complaint = self._engine.info.queue_complaint(
            num_samples=len(samples),
            num_tokens=len(samples[0].prompt),
            num_open=self._num_requests,
            num_waiting_tokens=self._num_waiting_tokens,
        )
        return complaint is None


def _closed() -> Cancelled:
    return Cancelled("this LLM is closed")
