"""One call of ``LLM``: its requests go to the engine, their events come back as outputs.

Knows the engine's requests and events, and the text of a stream. Must not know the forms of
prompts, or options.

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

from minisgl_backend.errors import MiniSGLError
from minisgl_backend.offline.prompts import naming
from minisgl_backend.offline.submitter import CallQueue, Submitter
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
    RequestId,
    TerminalEvent,
    TokenId,
    TokenLogprobs,
)
from minisgl_backend.text.answer_stream import AnswerStream
from minisgl_backend.text.vocabulary import Vocabulary
from minisgl_backend.wire.answer import Answer
from minisgl_backend.wire.packets import Packet, SampleDelta, StreamStart, Times

_STOP_STRINGS_EVERY: Final = 8
"""Without ``stream``, the caller looks for stop strings whenever there are this many new tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One sample of the output for a prompt: all of it (``generate``), or its new part
    (``stream``).

    In a stream, ``text``, ``token_ids``, ``num_output_tokens`` and both kinds of logprobs are those
    since the last output, and add up to the whole; the other fields are about the request so far.
    """

    index: int
    """The index of the prompt in the call."""
    sample: int
    """The index among the ``n`` samples of the prompt; with ``best_of`` the most likely is 0."""
    text: str
    """Whole characters, without a stop string."""
    token_ids: list[TokenId]
    """[num_output_tokens], including the token that ended the request."""
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
    Empty if not asked for, and in a stream after the sample's first output."""
    cumulative_logprob: float | None
    """The sum over all tokens so far; None if not asked for."""
    times: Times | None
    """None if not asked for."""
    embedding: FloatArray | None
    """float32[hidden_size] of length 1, of the prompt; None if not asked for by ``embed``."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedPrompt:
    """One prompt of a call, ready to be submitted: the engine's requests, one for each sample of
    the answer, and what is needed to turn tokens into text."""

    samples: Sequence[Request]
    start: StreamStart
    arrival_time_ns: int


@dataclass(slots=True)
class _Told:
    """What is known of a sample: to the caller, an output and the end; to the mailbox, the end in
    the engine."""

    has_begun: bool = False
    is_over: bool = False
    has_ended: bool = False


class Mailbox:
    """The sinks of one prompt's samples, and their text so far."""

    def __init__(
        self,
        index: int,
        prepared: PreparedPrompt,
        vocabulary: Vocabulary,
        ready: SimpleQueue[Mailbox | Exception],
        submitter: Submitter,
    ) -> None:
        self.index = index
        self.samples = prepared.samples
        self._told = [_Told() for _ in prepared.samples]
        self._num_running = len(prepared.samples)  # on the engine's side
        self._answers = AnswerStream(vocabulary, prepared.start)
        self._ready = ready
        self._submitter = submitter
        self._num_waiting_tokens = len(prepared.samples[0].prompt)
        self._wake_after = _tokens_per_wake(prepared.start)
        self._events: deque[tuple[int, PromptLogprobs | Generated | Embedded | TerminalEvent]] = (
            deque()
        )
        self._is_announced = False
        self._num_cached_tokens: int | None = None
        self._prompt_logprobs: list[TokenLogprobs | None] = []
        if prepared.start.wanted.prompt_logprobs:
            self._prompt_logprobs.append(None)
        self._arrival_ns = prepared.arrival_time_ns
        self._scheduled_ns = self._first_token_ns = self._last_token_ns = 0

    # --- the engine's thread -----------------------------------------------------------------

    def put(self, sample: int, event: Event) -> None:
        """Store an event of a sample, and wake the caller if it is time."""
        if isinstance(event, Admitted):
            if not sample:
                self._scheduled_ns = time.time_ns()
                self._num_cached_tokens = event.num_cached_tokens
                self._submitter.admitted(self._num_waiting_tokens)
                self._num_waiting_tokens = 0
            return
        self._events.append((sample, event))
        if isinstance(event, PromptLogprobs | Embedded):
            return
        if isinstance(event, Generated):
            if self._answers.start.wanted.perf_metrics:
                self._last_token_ns = time.time_ns()
                self._first_token_ns = self._first_token_ns or self._last_token_ns
            if self._is_announced or len(self._events) < self._wake_after:
                return
        else:
            self._num_running -= 1
            num_waiting_tokens = 0 if sample else self._num_waiting_tokens
            self._submitter.ended(self, num_waiting_tokens, is_last=not self._num_running)
            if self._num_running and isinstance(event, Finished) and self._wake_after > 1:
                return  # its answer waits for those of the others
        self._is_announced = True
        self._ready.put(self)

    # --- the caller's thread -----------------------------------------------------------------

    def read(self) -> list[Output]:
        """The outputs of the events so far. Raises the error of a failed request, unless a stop
        string has ended the sample before."""
        packet, failures = self._take()
        answer = self._answers.push(packet)
        for sample, error in failures.items():
            if not self._is_stopped(sample):
                raise error
        if answer is None:
            return []
        outputs = [
            self._output(sample, answer)
            for sample, one in enumerate(answer.samples)
            if one.token_ids
            or one.text
            or (one.finish is not None and not self._told[sample].is_over)
        ]
        for output in outputs:
            self._told[output.sample].is_over = output.finish_reason is not None
        return outputs

    def _output(self, sample: int, answer: Answer) -> Output:
        one, wanted, told = answer.samples[sample], self._answers.start.wanted, self._told[sample]
        prompt_logprobs = [] if told.has_begun else self._prompt_logprobs
        told.has_begun = True
        return Output(
            index=self.index,
            sample=sample,
            text=one.text or "",
            token_ids=list(one.token_ids),
            finish_reason=None if one.finish is None else one.finish.value,
            stop_reason=one.stop_reason,
            num_input_tokens=answer.num_input_tokens,
            num_output_tokens=len(one.token_ids),
            num_cached_tokens=answer.num_cached_tokens,
            logprobs=one.logprobs if wanted.logprobs else (),
            prompt_logprobs=prompt_logprobs,
            cumulative_logprob=(
                one.cumulative_logprob if wanted.logprobs or wanted.cumulative_logprob else None
            ),
            times=answer.times,
            embedding=answer.embedding,
        )

    @property
    def is_over(self) -> bool:
        """Whether all samples have had their last outputs."""
        return self._answers.over is not None

    def superfluous(self) -> list[RequestId]:
        """The samples that a stop string has ended but that still run in the engine."""
        return [
            request.id
            for sample, request in enumerate(self.samples)
            if self._is_stopped(sample) and not self._told[sample].has_ended
        ]

    def _is_stopped(self, sample: int) -> bool:
        """Whether a stop string has ended the sample."""
        return bool(self._answers.stopped >> sample & 1)

    def _take(self) -> tuple[Packet, dict[int, MiniSGLError]]:
        """The events so far as a packet, and the errors of samples that have failed."""
        self._is_announced = False  # before taking events, else the last one might go unnoticed
        num_samples = len(self.samples)
        token_ids: list[list[TokenId]] = [[] for _ in range(num_samples)]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in range(num_samples)]
        ends: list[Finished | None] = [None] * num_samples
        failures: dict[int, MiniSGLError] = {}
        embedding: FloatArray | None = None
        while self._events:
            sample, event = self._events.popleft()
            if isinstance(event, TerminalEvent):
                self._told[sample].has_ended = True
            if isinstance(event, Failed):
                failures[sample] = event.error
            elif isinstance(event, Finished):
                ends[sample] = event
            elif isinstance(event, PromptLogprobs):
                self._prompt_logprobs += event.tokens()
            elif isinstance(event, Embedded):
                embedding = event.vector
            else:
                token_ids[sample].append(event.token_id)
                if event.logprobs is not None:
                    logprobs[sample].append(event.logprobs)
        packet = Packet(
            reply_to="",  # this and the key are addresses on the wire
            key=0,
            index=0,
            deltas=[
                SampleDelta(token_ids[sample], logprobs[sample], ends[sample], sample)
                for sample in range(num_samples)
            ],
            num_cached_tokens=self._num_cached_tokens,
            is_last=all(told.has_ended for told in self._told),
            times=self._times(),
            embedding=embedding,
        )
        return packet, failures

    def _times(self) -> Times | None:
        if not self._answers.start.wanted.perf_metrics:
            return None
        return Times(
            self._arrival_ns, self._scheduled_ns, self._first_token_ns, self._last_token_ns
        )


class Call:
    """The requests of one call."""

    def __init__(
        self, submitter: Submitter, vocabulary: Vocabulary, prepared: Sequence[PreparedPrompt]
    ) -> None:
        self._submitter = submitter
        self._vocabulary = vocabulary
        self._prepared = prepared

    def __len__(self) -> int:
        return len(self._prepared)

    def outputs(self) -> Generator[Output, None, None]:
        """The outputs of all requests as they come; prompts are submitted as there is room."""
        ready: SimpleQueue[Mailbox | Exception] = SimpleQueue()
        boxes = (
            Mailbox(index, prepared, self._vocabulary, ready, self._submitter)
            for index, prepared in enumerate(self._prepared)
        )
        queue = CallQueue(boxes, on_failed=ready.put)
        num_left = len(self._prepared)
        try:
            self._submitter.submit(queue)
            while num_left:
                box = ready.get()
                if isinstance(box, Exception):
                    raise box
                if not box.is_over:  # else a stop string ended it, and the engine follows later
                    with naming(box.index if len(self) > 1 else None):
                        outputs = box.read()
                    for request_id in box.superfluous():
                        self._submitter.abort(request_id)
                    num_left -= box.is_over
                    yield from outputs
        except MiniSGLError:
            self._submitter.check_open()  # raises Cancelled if that is the cause
            raise
        finally:
            if num_left:
                self._submitter.cancel(queue)


def _tokens_per_wake(start: StreamStart) -> float:
    """Number of tokens that a request collects before it wakes the caller."""
    if start.stream:
        return 1
    return _STOP_STRINGS_EVERY if start.stop_strings else float("inf")
