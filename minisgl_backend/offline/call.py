"""One call of ``LLM``: its requests go to the engine, their events come back as outputs.

Knows the engine's requests and events, and the text of a stream. Must not know prompts or options.

A ``Call`` belongs to the thread that iterates over it. The engine's thread only puts events into
mailboxes, and wakes the caller no more often than a request needs.

Invariant: however the iteration ends, none of the call's requests goes on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

from minisgl_backend.errors import EngineFailure, MiniSGLError, Overloaded
from minisgl_backend.offline.room import Room
from minisgl_backend.request import (
    Admitted,
    Embedded,
    Event,
    Failed,
    Finished,
    FloatArray,
    Generated,
    PromptLogprobs,
    Request,
    TokenId,
    TokenLogprobs,
)
from minisgl_backend.runtime.engine import Engine
from minisgl_backend.text.answer_stream import AnswerStream
from minisgl_backend.text.vocabulary import Vocabulary
from minisgl_backend.wire.packets import Packet, StreamStart, Times

_STOP_STRINGS_EVERY: Final = 8
"""A request that is answered at its end is searched for stop strings after this many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The output for one prompt: all of it (``generate``), or its new part (``stream``).

    In a stream, ``text``, ``token_ids``, ``num_output_tokens`` and both kinds of logprobs are those
    since the last output, and add up to the whole; the other fields are about the request so far.
    """

    index: int
    """The prompt's place among those of the call."""
    text: str
    """Whole characters, without a stop string."""
    token_ids: list[TokenId]
    """[num_output_tokens], with the token that ended the request."""
    finish_reason: str | None
    """``stop``, ``length`` or ``timeout``; None while a stream runs."""
    stop_reason: str | TokenId | None
    """The stop string or token id that matched."""
    num_input_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    """Tokens of the prompt that came from the prefix cache."""
    logprobs: Sequence[TokenLogprobs]
    """[num_output_tokens], each with ``num_logprobs`` alternatives; empty if not asked for."""
    prompt_logprobs: Sequence[TokenLogprobs | None]
    """[num_input_tokens], each with ``num_prompt_logprobs`` alternatives; None for the first token.
    Empty if not asked for, and in a stream after the first output."""
    cumulative_logprob: float | None
    """The sum over all tokens so far; None if not asked for."""
    times: Times | None
    """None if not asked for."""
    embedding: FloatArray | None
    """float32[hidden_size] of length 1, of the prompt; None if not asked for by ``embed``."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One prompt of a call: the engine's request, and the data that its text depends on."""

    request: Request
    start: StreamStart
    arrival_time_ns: int


class Mailbox:
    """The sink of one request, and its text so far."""

    __slots__ = (
        "_answers",
        "_arrival_ns",
        "_events",
        "_first_token_ns",
        "_is_announced",
        "_last_token_ns",
        "_num_cached_tokens",
        "_num_waiting_tokens",
        "_prompt_logprobs",
        "_ready",
        "_room",
        "_scheduled_ns",
        "_untold_ids",
        "_wake_after",
        "has_ended",
        "index",
        "request",
    )

    def __init__(
        self,
        index: int,
        asked: Asked,
        vocabulary: Vocabulary,
        ready: SimpleQueue[Mailbox],
        room: Room,
    ) -> None:
        self.index = index
        self.request = asked.request
        self.has_ended = False
        """Whether the engine's last event has been read."""
        self._answers = AnswerStream(vocabulary, asked.start)
        self._ready = ready
        self._room = room
        self._num_waiting_tokens = len(asked.request.prompt)
        self._wake_after = _tokens_per_wake(asked.start)
        self._events: deque[PromptLogprobs | Generated | Embedded | Finished | Failed] = deque()
        self._is_announced = False
        self._num_cached_tokens: int | None = None
        self._untold_ids: list[TokenId] = []
        self._prompt_logprobs: list[TokenLogprobs | None] = []
        if asked.start.wanted.prompt_logprobs:
            self._prompt_logprobs.append(None)
        self._arrival_ns = asked.arrival_time_ns
        self._scheduled_ns = self._first_token_ns = self._last_token_ns = 0

    # --- the engine's thread -----------------------------------------------------------------

    def put(self, event: Event) -> None:
        """Store an event, and wake the caller if it is time."""
        if isinstance(event, Admitted):
            self._scheduled_ns = time.time_ns()
            self._num_cached_tokens = event.num_cached_tokens
            self._room.admitted(self._num_waiting_tokens)
            self._num_waiting_tokens = 0
            return
        self._events.append(event)
        if isinstance(event, PromptLogprobs | Embedded):
            return
        if isinstance(event, Generated):
            if self._answers.start.wanted.perf_metrics:
                self._last_token_ns = time.time_ns()
                self._first_token_ns = self._first_token_ns or self._last_token_ns
            if self._is_announced or len(self._events) < self._wake_after:
                return
        else:
            self._room.left(self._num_waiting_tokens)
        self._is_announced = True
        self._ready.put(self)

    # --- the caller's thread -----------------------------------------------------------------

    def read(self) -> Output | None:
        """The output of the events so far, if any. Raises the error of a failed request."""
        packet = self._take()
        self._untold_ids += packet.token_ids
        answer = self._answers.push(packet)
        if answer is None:
            return None
        count = answer.num_output_tokens
        told_ids, self._untold_ids = self._untold_ids[:count], self._untold_ids[count:]
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        wanted = self._answers.start.wanted
        return Output(
            index=self.index,
            text=answer.text or "",
            token_ids=told_ids,
            finish_reason=None if answer.finish is None else answer.finish.value,
            stop_reason=answer.stop_reason,
            num_input_tokens=answer.num_input_tokens,
            num_output_tokens=count,
            num_cached_tokens=answer.num_cached_tokens,
            logprobs=answer.logprobs if wanted.logprobs else (),
            prompt_logprobs=prompt_logprobs,
            cumulative_logprob=(
                answer.cumulative_logprob if wanted.logprobs or wanted.cumulative_logprob else None
            ),
            times=answer.times,
            embedding=answer.embedding,
        )

    def _take(self) -> Packet:
        self._is_announced = False  # before the events are taken, or the last might go unnoticed
        token_ids: list[TokenId] = []
        logprobs: list[TokenLogprobs] = []
        finish: Finished | None = None
        embedding: FloatArray | None = None
        while self._events:
            event = self._events.popleft()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                finish, self.has_ended = event, True
            elif isinstance(event, PromptLogprobs):
                self._prompt_logprobs += event.tokens()
            elif isinstance(event, Embedded):
                embedding = event.vector
            else:
                token_ids.append(event.token_id)
                if event.logprobs is not None:
                    logprobs.append(event.logprobs)
        return Packet(
            reply_to="",  # this and the key are addresses on the wire
            key=0,
            index=0,
            token_ids=token_ids,
            num_cached_tokens=self._num_cached_tokens,
            logprobs=tuple(logprobs),
            terminal=finish,
            times=self._times(),
            embedding=embedding,
        )

    def _times(self) -> Times | None:
        if not self._answers.start.wanted.perf_metrics:
            return None
        return Times(
            self._arrival_ns, self._scheduled_ns, self._first_token_ns, self._last_token_ns
        )


class Call:
    """The requests of one call."""

    def __init__(
        self, engine: Engine, room: Room, vocabulary: Vocabulary, asked: Sequence[Asked]
    ) -> None:
        self._engine = engine
        self._room = room
        self._vocabulary = vocabulary
        self._asked = asked

    def __len__(self) -> int:
        return len(self._asked)

    def outputs(self) -> Generator[Output, None, None]:
        """The outputs of all requests as they come; requests are submitted as there is room."""
        waiting = deque(enumerate(self._asked))
        open_: dict[int, Mailbox] = {}
        ready: SimpleQueue[Mailbox] = SimpleQueue()
        try:
            while waiting or open_:
                while waiting and self._enter(waiting[0][1], wait=not open_):
                    index, asked = waiting.popleft()
                    box = Mailbox(index, asked, self._vocabulary, ready, self._room)
                    open_[index] = box
                    self._submit(box)
                box = ready.get()
                if box.index not in open_:  # ended by a stop string before; now the engine says so
                    continue
                output = box.read()
                if output is None:
                    continue
                if output.finish_reason is not None:
                    del open_[box.index]
                    if not box.has_ended:
                        self._engine.abort(box.request.id)
                yield output
        except MiniSGLError:
            self._room.check_open()  # raises Cancelled if that is the cause
            raise
        finally:
            for box in open_.values():
                self._engine.abort(box.request.id)

    def _enter(self, asked: Asked, *, wait: bool) -> bool:
        return self._room.enter(len(asked.request.prompt), wait=wait)

    def _submit(self, box: Mailbox) -> None:
        try:
            self._engine.submit(box.request, box.put)
        except Overloaded as error:  # there is room for it, so the engine has broken down
            self._room.left(len(box.request.prompt))
            raise EngineFailure(str(error)) from None


def _tokens_per_wake(start: StreamStart) -> float:
    """How many tokens a request gathers before it wakes the caller."""
    if start.stream:
        return 1
    return _STOP_STRINGS_EVERY if start.stop_strings else float("inf")
